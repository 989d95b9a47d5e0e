"""Models of transformers on a GPU: its kernels, and two frameworks' streams and memory.

torch is the reference: in bfloat16 its own attention is as far from float32 as xsake may be.
"""

from __future__ import annotations

import hads_case
import pytest

torch = pytest.importorskip("torch", reason="torch and transformers have an environment of their own: make test-torch")
transformers = pytest.importorskip("transformers", reason="make test-torch")

import xsake.torch as xsake_torch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
WIDE = dict(vocab_size=97, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
WIDE |= dict(num_key_value_heads=2, head_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TOKENS = 1000
PROFILE = hads_case.random_profile(q_heads=4, kv_heads=2, head_dim=64, block=64)


@pytest.fixture(scope="module", autouse=True)
def registered():
    xsake_torch.register()


def model_of(implementation: str, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, max_position_embeddings=4096))
    model.to(dtype=dtype, device="cuda").eval().set_attn_implementation(implementation)
    return model


def prompts(tokens: int = TOKENS):
    return torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(0)).cuda()


def padding(side: str | None, tokens: int = TOKENS):
    mask = torch.ones(2, tokens, dtype=torch.int64)
    if side:
        mask[0, slice(300) if side == "left" else slice(-300, None)] = 0
    return mask.cuda()


def learned(model, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits of tokens, and every gradient."""
    model.zero_grad()
    logits = model(prompts(), attention_mask=mask).logits * mask[..., None]
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    logits.backward(cotangent)
    return {"logits": logits.detach()} | {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_errors_are_those_of_torch(side: str | None):
    mask = padding(side)
    true = learned(model_of("sdpa", torch.float32), mask)
    theirs, ours = (learned(model_of(name), mask) for name in ("sdpa", "xsake"))

    def error(found: dict[str, torch.Tensor], name: str) -> float:
        return (found[name].float() - true[name]).norm().item() / true[name].norm().item()

    wrong = {name: (error(ours, name), error(theirs, name)) for name in true}
    assert not {name: both for name, both in wrong.items() if both[0] > 1.2 * both[1]}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", [None, "left"])
def test_the_same_tokens_are_written(side: str | None, cache: str | None):
    given = dict(attention_mask=padding(side), max_new_tokens=24, do_sample=False, cache_implementation=cache)
    given |= dict(disable_compile=True)
    wanted, got = (model_of(name, torch.float32).generate(prompts(), **given) for name in ("sdpa", "xsake"))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("own_stream", [False, True])
def test_neither_framework_reads_what_the_other_has_not_written(own_stream: bool):
    """Every call's tensors are written just before by slow work, and freed just after: their memory is used again."""
    from xsake.torch import attention

    def steps(attend) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(0)
        x, total = torch.randn(1, 4, 1024, 64, device="cuda", generator=generator), 0.0
        weight = torch.randn(1024, 1024, device="cuda", generator=generator) / 32
        for _ in range(40):
            for _ in range(20):
                x = torch.tanh(weight @ x)
            made = x.bfloat16()
            out = attend(made, made.flip(2), made * 2)
            made.zero_()
            del made
            total = total + out.float().mean((0, 2))
            x = x + 0.1 * out.transpose(1, 2).float() if out.shape[1] == 1024 else x + 0.1 * out.float()
        return total

    def own(query, key, value):
        return attention(query, key, value, is_causal=True)

    def theirs(query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        wanted, got = steps(theirs), steps(own)
        again = steps(own)
    torch.cuda.synchronize()
    torch.testing.assert_close(got, again, rtol=0, atol=0)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tokens", [2048, 2000])
def test_hads_that_keeps_all_is_dense_and_a_half_is_not(tokens: int):
    model, ids = model_of("xsake"), prompts(tokens)
    with torch.no_grad():
        dense = model(ids).logits
        for budget, same in ((1.0, True), (0.5, False)):
            xsake_torch.hads(model, budget, profile=PROFILE, policy="always")
            sparse = model(ids).logits
            assert sparse.isfinite().all()
            assert torch.allclose(sparse, dense, rtol=0, atol=0.05) == same


def test_hads_learns():
    model, ids = model_of("xsake"), prompts(1024)
    xsake_torch.hads(model, 0.5, profile=PROFILE, policy="always")
    model(ids, labels=ids).loss.backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in model.parameters())


def test_tensors_of_a_cpu_beside_those_of_a_gpu_are_refused():
    from xsake.torch import attention

    here, there = torch.ones(1, 1, 64, 16), torch.ones(1, 1, 64, 16, device="cuda")
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        attention(here, there, there)
    torch.testing.assert_close(attention(here, here, here), here.transpose(1, 2))  # XLA's, for all that there is a GPU
