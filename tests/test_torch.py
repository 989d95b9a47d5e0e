"""transformers' models with `attn_implementation="xsake"`: as with sdpa, in logits, gradients and tokens.

torch and transformers are some gigabytes: `make test-torch` runs these in an environment of their own.
"""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import hads_case as case
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import hads

torch = pytest.importorskip("torch", reason="torch and transformers have an environment of their own: make test-torch")
transformers = pytest.importorskip("transformers", reason="make test-torch")

import xsake.torch as xsake_torch  # noqa: E402
from xsake.torch import masks  # noqa: E402
from xsake.torch import of_tensors as call  # noqa: E402
from xsake.torch import transformers as of_transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = dict(sliding_window=24)
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **WINDOW),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **WINDOW, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **WINDOW, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **WINDOW, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
}
BY_EAGER = ("gemma2", "gpt_oss")  # sdpa has no soft cap and no sinks
TOKENS, PADDED = 50, 9


@pytest.fixture(scope="module", autouse=True)
def registered():
    xsake_torch.register()


def model_of(family: str):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def prompts():
    return torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def padding(side: str | None):
    if side is None:
        return None
    if side == "holes":
        return (torch.arange(TOKENS) % 11 != 5).long().expand(2, -1) * padding("left")
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    if side != "none of it":
        mask[0, slice(PADDED) if side == "left" else slice(-PADDED, None)] = 0
    return mask


def read(model, implementation: str, **given):
    """Logits where tokens are, and the gradients of every parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(prompts(), **given).logits
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        logits = logits * mask[..., None]
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    (logits * cotangent).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_same(model, reference: str, tolerance: float = 2e-5, **given):
    (wanted, wanted_grads), (got, grads) = (read(model, name, **given) for name in (reference, "xsake"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=tolerance * max(1.0, grad.abs().max().item()))


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


def tensors(tokens: int = 70, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(2, heads, tokens, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


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


def test_wrong_tensors_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"the query is torch.float64: convert it"):
        xsake_torch.attention(q.double(), k, v)
    with pytest.raises(ValueError, match=r"on one device, and are on \['cpu', 'meta'\]"):
        xsake_torch.attention(q, k.to("meta"), v)
    (grad,) = torch.autograd.grad(xsake_torch.attention(q, k, v, is_causal=True).sum(), q)
    assert grad.shape == q.shape
    with pytest.raises(NotImplementedError, match="no second derivatives: leave out create_graph"):
        torch.autograd.grad(xsake_torch.attention(q, k, v, is_causal=True).sum(), q, create_graph=True)


def test_a_model_compiled_by_torch_is_right():
    model = model_of("llama")
    wanted, _ = read(model, "sdpa", attention_mask=padding("left"))
    model.set_attn_implementation("xsake")
    with torch.no_grad():
        got = torch.compile(model, backend="eager")(prompts(), attention_mask=padding("left")).logits
    torch.testing.assert_close(got * padding("left")[..., None], wanted, rtol=0, atol=2e-5)


PROFILE = case.random_profile(q_heads=4, kv_heads=2, head_dim=16, block=16)


@pytest.mark.parametrize("side", [None, "left", "right", "holes"])
def test_hads_with_all_blocks_is_dense(side: str | None):
    model = model_of("llama")
    model.set_attn_implementation("xsake")
    xsake_torch.hads(model, PROFILE, 1.0, policy="always")
    check_same(model, "sdpa", attention_mask=padding(side))
    with torch.no_grad():  # gradients of padded prompts are dense
        logits = {}
        for name in ("sdpa", "xsake"):
            model.set_attn_implementation(name)
            logits[name] = model(prompts(), attention_mask=padding(side)).logits
    text = torch.ones(2, TOKENS, dtype=torch.bool) if side is None else padding(side).bool()
    torch.testing.assert_close(logits["xsake"][text], logits["sdpa"][text], rtol=0, atol=2e-5)


def test_hads_leaves_a_mask_alone_that_is_not_causal():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, is_causal=False, attn_implementation="xsake")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        wanted = model(prompt_of()).logits
        xsake_torch.hads(model, PROFILE, 0.6, policy="always")
        mask = torch.ones(1, 250, dtype=torch.int64)
        mask[0, :9] = 0
        module = model.model.layers[0].self_attn
        q, k, v = (x.detach()[:1] for x in tensors(250))
        one = masks.tokens_mask(1, 250, 250, mask_function=masks.bidirectional_mask_function, attention_mask=mask)
        assert not masks.said_by(one, 250, 250).is_causal
        out, _ = of_transformers.forward(module, q, k, v, one)
        seen = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.bool()[:, None, None], enable_gqa=True
        )
    torch.testing.assert_close(out.transpose(1, 2)[:, :, 9:], seen[:, :, 9:], rtol=0, atol=1e-5)
    assert wanted.isfinite().all()


def prompt_of(tokens: int = 250):
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(5))


def test_hads_reads_a_prompt_as_hads_attention_does():
    q, k, v = (x.detach() for x in tensors(250))
    attention = hads.Attention(PROFILE, 0.6, policy="always")
    ends = torch.full((2,), 250, dtype=torch.int32)
    for layer in range(2):
        text = torch.zeros_like(ends), ends, torch.zeros((2, 250), dtype=torch.int32)
        sparse = call.Sparse(attention, layer, text)
        got = xsake_torch.attention(q, k, v, is_causal=True, sparse=sparse)
        wanted = attention(*(jnp.asarray(x.transpose(1, 2).numpy()) for x in (q, k, v)), layer=layer)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=2e-6)
    dense = xsake_torch.attention(q, k, v, is_causal=True)
    assert (got - dense).abs().max() > 1e-3


def test_hads_in_a_model_with_and_without_padding():
    model, prompt = model_of("llama"), prompt_of()
    model.set_attn_implementation("xsake")
    dense = model(prompt).logits
    xsake_torch.hads(model, PROFILE, 0.6, policy="always")
    with torch.no_grad():
        sparse = model(prompt).logits
    assert (sparse - dense).abs().max() > 1e-4
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.int64), prompt], 1)
    mask = (padded != 0).long()
    with torch.no_grad():
        got = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)).logits[:, 30:]
    torch.testing.assert_close(got, sparse, rtol=0, atol=2e-5)
    trained = model(prompt).logits
    torch.testing.assert_close(trained, sparse, rtol=0, atol=2e-5)
    trained[:, -1].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    assert tokens[0, 250] == sparse[0, -1].argmax()
    xsake_torch.hads(model, None)
    torch.testing.assert_close(model(prompt).logits, dense, rtol=0, atol=0)


def test_hads_of_another_model_is_refused():
    with pytest.raises(ValueError, match="the profile of 'random' has 2 layers, and the model 3: calibrate this model"):
        config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 3})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="xsake")
        xsake_torch.hads(model, PROFILE)
    with pytest.raises(ValueError, match="the model attends by 'sdpa', which knows no HADS"):
        xsake_torch.hads(model_of("llama"), PROFILE)
    with pytest.raises(ValueError, match="Linear has no layers with a layer_idx"):
        xsake_torch.hads(torch.nn.Linear(2, 2), PROFILE)


def test_padded_lengths():
    assert [call.bucket(n) for n in (1, 2, 64, 65, 1000, 5000)] == [1, 64, 64, 128, 1024, 5120]


def test_the_example_runs():
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "transformers_on_torch.py"))
