"""The names of a Llama's configuration and parameters in GGUF files and in Hugging Face's files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from xsake.model.config import FIELDS, ModelConfig
from xsake.model.fields import check

# Our name of a field, and GGUF's. `vocab_size` follows from the embedding's shape, `tied` from the tensors' names.
GGUF_FIELDS = {
    "layers": "llama.block_count",
    "width": "llama.embedding_length",
    "q_heads": "llama.attention.head_count",
    "kv_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "mlp_width": "llama.feed_forward_length",
    "context": "llama.context_length",
    "rope_base": "llama.rope.freq_base",
    "norm_eps": "llama.attention.layer_norm_rms_epsilon",
}
# Our name of a field, and Hugging Face's.
HUGGING_FACE_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}

Path = tuple[Any, ...]  # of a parameter, as `nnx.to_flat_state` has it: ("blocks", 0, "mlp", "up", "kernel")

# The names of each parameter: ours, GGUF's, Hugging Face's.
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


def read_config(
    file: pathlib.Path,
    given: Mapping[str, Any],
    names: Mapping[str, str],
    found: Mapping[str, Any],
    *,
    tensors: int,
) -> ModelConfig:
    """The configuration of a file with the fields `given` and `tensors` tensors.

    `names` maps our fields to the file's. `found` holds our fields that are known from elsewhere. Files may leave out
    the number of KV heads, the size of a head and the rotary base.
    """
    values = dict(found) | {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    for ours, value in values.items():
        check(names.get(ours, ours), value, FIELDS[ours], file)
    optional = ("kv_heads", "head_dim", "rope_base")
    if missing := sorted(theirs for ours, theirs in names.items() if ours not in values and ours not in optional):
        raise ValueError(f"{file} lacks the field {', '.join(missing)}")
    if values["layers"] > tensors:  # before a name is made for each tensor of each layer
        raise ValueError(f"{file}: {names['layers']}={values['layers']}, but there are only {tensors} tensors")
    defaults = {"kv_heads": values["q_heads"], "head_dim": values["width"] // values["q_heads"], "rope_base": 10_000.0}
    try:
        return ModelConfig(**defaults | values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


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
