"""Small random models of transformers, and what they read."""

from __future__ import annotations

import hads_case
import torch
import transformers

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
PROFILE = hads_case.random_profile(q_heads=4, kv_heads=2, head_dim=16, block=16)
TOKENS, PADDED = 50, 9


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


def prompt_of(tokens: int = 250):
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(5))


def tensors(tokens: int = 70, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(2, heads, tokens, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


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
