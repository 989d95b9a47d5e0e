"""What the parameters of a Llama are called in the files of others."""

from __future__ import annotations

from typing import Any

from xsake.model.config import ModelConfig

Path = tuple[Any, ...]  # of a parameter, as `nnx.to_flat_state` has it: ("blocks", 0, "mlp", "up", "kernel")

# Ours, GGUF's, Hugging Face's.
_MODEL = (
    (("embed", "embedding"), "token_embd", "model.embed_tokens"),
    (("norm", "scale"), "output_norm", "model.norm"),
    (("head", "kernel"), "output", "lm_head"),  # last: a tied model has none
)
_LAYER = (
    (("attention_norm", "scale"), "attn_norm", "input_layernorm"),
    (("attention", "query", "kernel"), "attn_q", "self_attn.q_proj"),
    (("attention", "key", "kernel"), "attn_k", "self_attn.k_proj"),
    (("attention", "value", "kernel"), "attn_v", "self_attn.v_proj"),
    (("attention", "output", "kernel"), "attn_output", "self_attn.o_proj"),
    (("mlp_norm", "scale"), "ffn_norm", "post_attention_layernorm"),
    (("mlp", "gate", "kernel"), "ffn_gate", "mlp.gate_proj"),
    (("mlp", "up", "kernel"), "ffn_up", "mlp.up_proj"),
    (("mlp", "down", "kernel"), "ffn_down", "mlp.down_proj"),
)


def gguf_names(config: ModelConfig) -> dict[Path, str]:
    """The GGUF tensor that holds each parameter."""
    names: dict[Path, str] = {ours: f"{gguf}.weight" for ours, gguf, _ in _MODEL[: 2 if config.tied else 3]}
    for layer in range(config.layers):
        names |= {("blocks", layer, *ours): f"blk.{layer}.{gguf}.weight" for ours, gguf, _ in _LAYER}
    return names


def hugging_face_names(config: ModelConfig) -> dict[Path, str]:
    """The tensor of a Hugging Face Llama that holds each parameter."""
    names: dict[Path, str] = {ours: f"{theirs}.weight" for ours, _, theirs in _MODEL[: 2 if config.tied else 3]}
    for layer in range(config.layers):
        names |= {("blocks", layer, *ours): f"model.layers.{layer}.{theirs}.weight" for ours, _, theirs in _LAYER}
    return names
