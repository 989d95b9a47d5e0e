"""HADS in models of transformers on torch: its calibration, whole prompts, chunks, caches."""

from __future__ import annotations

import dataclasses
import warnings

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import hads
from xsake.hads.calibration.by_layer import ByLayer
from xsake.hads.calibration.steps import Steps
from xsake.hads.profile.causal_grid import CausalGrid

torch = pytest.importorskip("torch", reason="torch and transformers have an environment of their own: make test-torch")
transformers = pytest.importorskip("transformers", reason="make test-torch")

from torch_case import PROFILE, SIZES, TOKENS, check_same, model_of, padding, prompt_of, prompts, tensors  # noqa: E402

import xsake.torch as xsake_torch  # noqa: E402
from xsake.torch import crossing, masks  # noqa: E402
from xsake.torch import of_tensors as call  # noqa: E402
from xsake.torch import transformers as of_transformers  # noqa: E402
from xsake.torch.watched import WatchedModel, weights_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
TEXTS = np.random.default_rng(0).integers(3, 97, (2, 256)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def registered():
    xsake_torch.register()


def sparse_model(family: str = "llama", budget: float = 0.6, **of_profile):
    model = model_of(family)
    model.set_attn_implementation("xsake")
    xsake_torch.hads(model, budget, profile=dataclasses.replace(PROFILE, **of_profile), policy="always")
    return model


def test_a_model_is_watched_as_xsakes_own_is(tmp_path):
    """The same weights in torch and in JAX: the same observations of every layer, and costs of dropped blocks."""
    from xsake.model import load_pretrained

    model = model_of("llama").train()
    model.set_attn_implementation("xsake")
    model.save_pretrained(tmp_path)
    grid, found = CausalGrid(TEXTS.shape[1], 16), []
    for one in (WatchedModel(model), ByLayer(load_pretrained(tmp_path, dtype=jnp.float32), grid.length)):
        seen = list(one.observe(TEXTS, grid, Steps(None, {}), 0))
        kept = jnp.broadcast_to(grid.forced(), (1, 4, grid.rows, grid.columns))
        found.append((seen, one.costs(jnp.asarray(TEXTS[:1]), lambda _, kept=kept: kept, grid, jax.random.key(3))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *found)
    assert all(module.training for module in model.modules())
    assert all(x.requires_grad and x.grad is None for x in model.parameters())


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_windows_of_a_watched_model(family: str):
    model = model_of(family)
    model.set_attn_implementation("xsake")
    layers = ["full_attention", "sliding_attention"]
    if family == "gemma3":
        config = transformers.Gemma3TextConfig(**SIZES, sliding_window=24, head_dim=16, layer_types=layers)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="xsake")
    one = WatchedModel(model)
    assert (one.window, one.windowed, one.number) == ((24, (), 2) if family == "mistral" else (None, (1,), 1))


def test_a_profile_is_made_once_and_found_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path))
    model, prompt = model_of("llama"), prompt_of()
    model.set_attn_implementation("xsake")
    dense = model(prompt).logits
    with pytest.raises(ValueError, match=r"no tokenizer is saved with it: give hads\(model, texts=\) its tokenizer"):
        xsake_torch.hads(model, 0.6)
    with pytest.raises(ValueError, match=r"texts must be a tokenizer or ints \[N, T\], got float32 \[2\]"):
        xsake_torch.hads(model, 0.6, texts=torch.ones(2))
    with pytest.raises(ValueError, match=r"budget=1.5 must be a share"):
        xsake_torch.hads(model, 1.5)
    said = []
    for texts in (torch.from_numpy(TEXTS), None):
        xsake_torch.hads(model, 0.6, texts=texts, length=250, policy="always")
        said.append((capsys.readouterr().err, model(prompt).logits))
    (first, sparse), (again, same) = said
    assert "LlamaForCausalLM has no HADS profile yet: calibrating on 2 texts of 256 tokens, once" in first
    assert "heads of each layer: 2 of 2" in first and "calibrated in " in first
    assert again == "HADS chooses blocks of 16 by a profile from 2 texts of 256 tokens\n"
    assert torch.equal(sparse, same) and (sparse - dense).abs().max() > 1e-4
    half = model.to(torch.bfloat16)
    assert hads.HadsProfile.find(weights_of(half), 250).length == 256


def in_chunks(model, tokens: torch.Tensor, mask: torch.Tensor, cache: str, size: int, new: int = 3):
    """Logits of the first new tokens."""
    given = dict(max_new_tokens=new, do_sample=False, cache_implementation=cache, disable_compile=True)
    given |= dict(output_logits=True, return_dict_in_generate=True, prefill_chunk_size=size or None)
    with torch.no_grad():
        return torch.stack(model.generate(tokens, attention_mask=mask, **given).logits)


@pytest.mark.parametrize("slots", [250, 320])
def test_a_chunk_is_read_as_hads_attention_does(slots: int):
    """The keys are those so far, of a dynamic cache, or more slots, of a static one."""
    q, k, v = (x.detach() for x in tensors(250))
    attention = hads.Attention(PROFILE, 0.6, policy="always")
    lengths = torch.tensor([250, 222], dtype=torch.int32)
    text = torch.zeros_like(lengths), lengths, torch.zeros((2, 122), dtype=torch.int32)
    more = (torch.nn.functional.pad(x, (0, 0, 0, slots - 250), value=99.0) for x in (k, v))
    got = xsake_torch.attention(q[:, :, 128:], *more, is_causal=True, sparse=call.Sparse(attention, 1, text, 128))
    q, k, v = (jnp.asarray(x.transpose(1, 2).numpy()) for x in (q, k, v))
    wanted = attention(q[:, 128:], k, v, layer=1, start=128, lengths=jnp.asarray(lengths.numpy()))
    for n, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(got[n, : length - 128].numpy(), wanted[n, : length - 128], rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_in_chunks_by_every_cache(family: str):
    """By a dynamic and by a static cache alike; of a model with windows in some layers, all blocks are dense."""
    model, profile = (model_of("llama"), PROFILE) if family == "llama" else mixed()
    model.set_attn_implementation("xsake")
    prompt = prompt_of()
    mask = torch.ones_like(prompt)
    dense = in_chunks(model, prompt, mask, "dynamic", 0)
    xsake_torch.hads(model, 0.6 if family == "llama" else 1.0, profile=profile, policy="always")
    one, other = (in_chunks(model, prompt, mask, cache, 128) for cache in ("dynamic", "static"))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    if family == "llama":
        assert (one - dense).abs().max() > 1e-4
    else:
        torch.testing.assert_close(one, dense, rtol=0, atol=2e-5)


def mixed():
    """A model with a window in its first layer, none in the second, and the profile of the latter."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=24, head_dim=16, layer_types=layers)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    profile = case.random_profile(layers=1, q_heads=4, kv_heads=2, head_dim=16, block=16)
    return model, dataclasses.replace(profile, windowed=(0,))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_in_chunks(side: str):
    """Padding behind a text is left out of the choice; chunks with padding before a text are dense, and say so."""
    crossing._said.clear()
    model, prompt = sparse_model(budget=1.0 if side == "left" else 0.6), prompt_of()
    one = prompt[:, :200]
    empty = torch.zeros(1, 50, dtype=torch.int64)
    padded = torch.cat([prompt, torch.cat([empty, one] if side == "left" else [one, empty], 1)])
    mask = (padded != 0).long()
    places = (mask.cumsum(-1) - 1).clamp(0)

    def chunks(tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        cache, found = transformers.DynamicCache(config=model.config), []
        for at in (0, 128):
            part = slice(at, at + 128)
            given = dict(attention_mask=mask[:, : at + 128], position_ids=places[:, part], past_key_values=cache)
            found.append(model(tokens[:, part], **given).logits)
        return torch.cat(found, 1)

    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = chunks(padded, mask, places)
    said = [str(one.message) for one in caught if "HADS" in str(one.message)]
    assert said == (["HADS leaves a chunk of a prompt dense: it has padding before a text"] if side == "left" else [])
    with torch.no_grad():
        if side == "right":
            short = slice(1, 2), slice(200)
            torch.testing.assert_close(got[short], chunks(padded[short], mask[short], places[short])[0][None])
            return
        model.set_attn_implementation("sdpa")
        wanted = model(padded, attention_mask=mask, position_ids=places).logits
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=0, atol=2e-5)


def test_chunks_off_the_grid_are_dense_and_say_so():
    crossing._said.clear()
    model, prompt = sparse_model(), prompt_of()
    with pytest.warns(RuntimeWarning, match="dense: it does not begin at a multiple of 16 tokens"):
        in_chunks(model, prompt, torch.ones_like(prompt), "dynamic", 100)


def test_hads_in_a_window():
    """A model whose every layer has a window: whole prompts, padded and not, by a dynamic and by a static cache."""
    model, prompt = model_of("mistral"), prompt_of()
    model.set_attn_implementation("xsake")
    dense = model(prompt).logits
    profile = dataclasses.replace(PROFILE, window=24, block=8, block_q=8)
    xsake_torch.hads(model, 0.6, profile=profile, policy="always")
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.int64), prompt], 1)
    mask = (padded != 0).long()
    with torch.no_grad():
        one = model(prompt).logits
        other = model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)).logits[:, 30:]
        first = in_chunks(model, prompt, torch.ones_like(prompt), "static", 0, new=1)[0]
    assert (one - dense).abs().max() > 1e-4
    torch.testing.assert_close(other, one, rtol=0, atol=2e-5)
    torch.testing.assert_close(first, one[:, -1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("side", [None, "left", "right", "holes"])
def test_hads_with_all_blocks_is_dense(side: str | None):
    model = model_of("llama")
    model.set_attn_implementation("xsake")
    xsake_torch.hads(model, 1.0, profile=PROFILE, policy="always")
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
        xsake_torch.hads(model, 0.6, profile=PROFILE, policy="always")
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
    xsake_torch.hads(model, 0.6, profile=PROFILE, policy="always")
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
        xsake_torch.hads(model, profile=PROFILE)
    with pytest.raises(ValueError, match="the model attends by 'sdpa', which knows no HADS"):
        xsake_torch.hads(model_of("llama"), profile=PROFILE)
    with pytest.raises(ValueError, match="Linear has no layers with a layer_idx"):
        xsake_torch.hads(torch.nn.Linear(2, 2), profile=PROFILE)
