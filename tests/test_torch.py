"""transformers' models with `attn_implementation="xsake"`: as with sdpa, in logits, gradients and tokens.

torch and transformers are some gigabytes: `make test-torch` runs these in an environment of their own.
"""

from __future__ import annotations

import os
import runpy
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import pytest

from xsake.model import load_pretrained, load_tokenizer, save_pretrained
from xsake.model.weights import fetch

torch = pytest.importorskip("torch", reason="torch and transformers have an environment of their own: make test-torch")
transformers = pytest.importorskip("transformers", reason="make test-torch")

from torch_case import FAMILIES, SIZES, TOKENS, check_same, model_of, padding, prompts, read, tensors  # noqa: E402

import xsake.torch as xsake_torch  # noqa: E402
from xsake.torch import crossing  # noqa: E402
from xsake.torch import of_tensors as call  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
BY_EAGER = ("gemma2", "gpt_oss")  # sdpa has no soft cap and no sinks


@pytest.fixture(scope="module", autouse=True)
def registered():
    xsake_torch.register()


@pytest.mark.parametrize("side", [None, "none of it", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_torch(family: str, side: str | None):
    reference = "eager" if family in BY_EAGER else "sdpa"
    check_same(model_of(family), reference, attention_mask=padding(side))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sequences_packed_into_one_do_not_see_each_other(family: str):
    positions = torch.cat([torch.arange(20), torch.arange(30)]).expand(2, -1)
    check_same(model_of(family), "sdpa", position_ids=positions)


def test_a_mask_of_ones_own():
    """Elements that are neither a triangle nor padding: every query sees itself and a third of the others."""
    seen = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.3
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    check_same(model_of("llama"), "sdpa", attention_mask=seen)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_the_same_tokens_are_written(family: str, cache: str, side: str | None):
    model, wanted = model_of(family), {}
    reference = "eager" if family in BY_EAGER else "sdpa"
    for implementation in (reference, "xsake"):
        model.set_attn_implementation(implementation)
        options = dict(max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True)
        given = padding("none of it" if side is None else side)
        wanted[implementation] = model.generate(prompts(), attention_mask=given, **options)
    assert torch.equal(wanted[reference], wanted["xsake"])


def test_new_tokens_compile_few_programs():
    model = model_of("llama")
    model.set_attn_implementation("xsake")
    before = call._forward._cache_size()
    model.generate(prompts(), attention_mask=padding("left"), max_new_tokens=60, do_sample=False)
    assert call._forward._cache_size() - before <= 3  # the prompt, and keys of 64 and 128 tokens


def test_bfloat16_is_as_near_to_float32_as_torchs():
    model = model_of("llama")
    exact, _ = read(model, "sdpa", attention_mask=padding("left"))
    model = model.to(torch.bfloat16)
    errors = {name: (read(model, name, attention_mask=padding("left"))[0] - exact).norm() for name in ("sdpa", "xsake")}
    assert errors["xsake"] < 1.2 * errors["sdpa"]


def test_what_xsake_does_not_compute_is_torchs_and_said_once():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    model.set_attn_implementation("xsake")
    with pytest.warns(RuntimeWarning, match=r"dropout=0\.5 is computed by torch's sdpa, not by xsake"):
        model(prompts(), attention_mask=padding("left"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(prompts(), attention_mask=padding("left"))
    torch.manual_seed(0)
    double = model.eval().double()
    logits = {}
    for name in ("sdpa", "xsake"):
        double.set_attn_implementation(name)
        logits[name] = double(prompts(), attention_mask=padding("left")).logits[padding("left").bool()]
    torch.testing.assert_close(logits["xsake"], logits["sdpa"])


@pytest.mark.parametrize("is_causal", [True, False])
def test_tensors_that_are_not_contiguous(is_causal: bool):
    q, k, v = tensors()
    strided = [torch.randn(2, 70, x.shape[1], 32)[..., ::2].transpose(1, 2) for x in (q, k, v)]
    out = xsake_torch.attention(*strided, is_causal=is_causal)
    wanted = torch.nn.functional.scaled_dot_product_attention(*strided, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), wanted, rtol=0, atol=1e-5)
    one, *others = tensors(1)[:1] + tensors(70)[1:]
    out = xsake_torch.attention(one, *(x.expand(2, -1, -1, -1) for x in others))
    torch.testing.assert_close(
        out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(one, *others, enable_gqa=True)
    )


def test_wrong_tensors_are_refused(monkeypatch):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"the query is torch.float64: convert it"):
        xsake_torch.attention(q.double(), k, v)
    with pytest.raises(ValueError, match=r"of one dtype, and are torch.float32, torch.float64 and torch.float32"):
        xsake_torch.attention(q, k.double(), v)
    with pytest.raises(ValueError, match=r"on one device, and are on \['cpu', 'meta'\]"):
        xsake_torch.attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match=r"on one device, and are on \['cpu', 'meta'\]"):
        xsake_torch.attention(q, k, v, sinks=torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match=r"on a CPU or on an NVIDIA GPU, and these are on 'meta': move them"):
        xsake_torch.attention(*(x.to("meta") for x in (q, k, v)))
    with monkeypatch.context() as two_gpus:
        two_gpus.setattr(jax, "local_devices", lambda backend: [0, 1] if backend == "gpu" else [0])
        crossing.check_device.cache_clear()
        crossing.check_device(torch.device("cuda", 1))
        with pytest.raises(ValueError, match=r"the tensors are on 'cuda:2', and JAX has .* only: pip install"):
            crossing.check_device(torch.device("cuda", 2))
    crossing.check_device.cache_clear()
    (grad,) = torch.autograd.grad(xsake_torch.attention(q, k, v, is_causal=True).sum(), q)
    assert grad.shape == q.shape
    with pytest.raises(NotImplementedError, match="no second derivatives: leave out create_graph"):
        torch.autograd.grad(xsake_torch.attention(q, k, v, is_causal=True).sum(), q, create_graph=True)


def test_tensors_that_learn_where_nothing_is_learned():
    q, k, v = tensors()
    wanted = xsake_torch.attention(q, k, v, is_causal=True)
    for quiet in (torch.inference_mode, torch.no_grad):
        with quiet():
            got = xsake_torch.attention(q, k, v, is_causal=True)
        assert not got.requires_grad and torch.equal(got, wanted)
    with torch.inference_mode():
        mine = [x * 1 for x in (q, k, v)]
    assert torch.equal(xsake_torch.attention(*mine, is_causal=True), wanted)


def test_autocast_is_as_near_to_float32_as_torchs():
    model = model_of("llama")
    exact, _ = read(model, "sdpa", attention_mask=padding("left"))
    errors = {}
    for name in ("sdpa", "xsake"):
        with torch.autocast("cpu", torch.bfloat16):
            errors[name] = (read(model, name, attention_mask=padding("left"))[0] - exact).norm()
    assert 0 < errors["xsake"] < 1.2 * errors["sdpa"]


@pytest.mark.parametrize("given", [{}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}])
def test_jax_leaves_a_gpus_memory_to_torch(given: dict, monkeypatch, recwarn):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    xsake_torch._leave_memory_to_torch()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == given.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert ["JAX was used before xsake.torch was imported" in str(one.message) for one in recwarn] == [True][
        : not given
    ]


def test_a_model_compiled_by_torch_is_right():
    model = model_of("llama")
    wanted, _ = read(model, "sdpa", attention_mask=padding("left"))
    model.set_attn_implementation("xsake")
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(prompts(), attention_mask=padding("left")).logits
    torch.testing.assert_close(got * padding("left")[..., None], wanted, rtol=0, atol=2e-5)


def test_padded_lengths():
    assert [call.bucket(n) for n in (1, 2, 64, 65, 1000, 5000)] == [1, 64, 64, 128, 1024, 5120]


def test_the_example_runs():
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "transformers_on_torch.py"))


@pytest.mark.pretrained
@pytest.mark.skipif(not fetch.place("smollm2").exists(), reason="fetch it first: xsake model fetch smollm2")
def test_smollm2(tmp_path, capsys):
    """Published weights: logits, gradients and tokens as by sdpa, and the profile that comes with xsake."""
    save_pretrained(load_pretrained("smollm2", dtype=jnp.float32), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    text = torch.tensor(load_tokenizer("smollm2").encode(topics["assignment"])[:200])[None]
    found = {}
    for name in ("sdpa", "xsake"):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(text, labels=text)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            tokens = model.generate(text[:, :50], attention_mask=torch.ones(1, 50), max_new_tokens=8, do_sample=False)
        found[name] = out.logits.detach(), grads, tokens
    (wanted, wanted_grads, tokens), (got, grads, same) = found.values()
    assert torch.equal(tokens, same)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-4 * grad.abs().max().item())
    xsake_torch.hads(model, 0.2)
    assert "by a profile from" in capsys.readouterr().err


def test_a_bias_learns():
    """T5's bias of relative positions is made of weights."""
    query, key, value = tensors(40)
    bias = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(4), requires_grad=True)
    down = torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(5))

    def theirs() -> torch.Tensor:
        both = (x.repeat_interleave(2, 1) for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, *both, attn_mask=bias).transpose(1, 2)

    given = [query, key, value, bias]
    wanted, got = (torch.autograd.grad(out, given, down) for out in (theirs(), call.attention(*given[:3], bias=bias)))
    for theirs_, ours in zip(wanted, got, strict=True):
        torch.testing.assert_close(ours, theirs_, rtol=1e-4, atol=2e-5)
