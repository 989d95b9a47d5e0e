"""The families of models that are read: what sets each apart, and its names in GGUF and in Hugging Face's files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from xsake._ground.fields import check, kinds_of
from xsake.model.network.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture, as a configuration of the one transformer.

    - `fixed`: the fields of `ModelConfig` that the architecture fixes.
    - `defaults`: what files may leave out.
    - `gguf_pairs`: GGUF files store the features of queries and keys in rotary pairs (0, 1), (2, 3), ...
    """

    hugging_face_class: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_gguf: bool = True
    gguf_pairs: bool = False


# By Hugging Face's `model_type` and GGUF's `general.architecture`. In GGUF, Mistral is called llama.
FAMILIES = {
    "llama": Family(hugging_face_class="LlamaForCausalLM", gguf_pairs=True),
    "mistral": Family(hugging_face_class="MistralForCausalLM", in_gguf=False),
    "qwen2": Family(hugging_face_class="Qwen2ForCausalLM", fixed={"qkv_bias": True}),
    "qwen3": Family(hugging_face_class="Qwen3ForCausalLM", fixed={"qk_norm": True}, defaults={"head_dim": 128}),
}

# Our name of a field, and GGUF's after the architecture. `vocab_size` follows from the embedding's shape, `tied` from
# the tensors' names.
_GGUF_FIELDS = {
    "layers": "block_count",
    "width": "embedding_length",
    "q_heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "mlp_width": "feed_forward_length",
    "context": "context_length",
    "rope_base": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "window": "attention.sliding_window",
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
)
_HEAD = ((("head", "kernel"), "output", "lm_head"),)
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
_BIASES = tuple(((*ours[:-1], "bias"), gguf, theirs) for ours, gguf, theirs in _LAYER[1:4])  # of q, k and v
_HEAD_NORMS = (
    (("attention", "query_norm", "scale"), "attn_q_norm", "self_attn.q_norm"),
    (("attention", "key_norm", "scale"), "attn_k_norm", "self_attn.k_norm"),
)


def find(file: pathlib.Path, what: str, name: Any) -> Family:
    """The family of that name. ValueError if there is none; `what` says what the file calls the name."""
    gguf = what == "architecture"
    known = [each for each, family in FAMILIES.items() if family.in_gguf or not gguf]
    if name not in known:
        raise ValueError(f"{file} is of {what} {name!r}, which is not known; these can be loaded: {', '.join(known)}")
    return FAMILIES[name]


def of_config(config: ModelConfig) -> str:
    """The name of the simplest family that has such models."""
    features = {"qkv_bias": config.qkv_bias, "qk_norm": config.qk_norm}
    windowed = config.window is not None
    order = ("mistral", "qwen2", "qwen3") if windowed else ("llama", "qwen2", "qwen3")
    for name in order:
        fixed = dict.fromkeys(features, False) | dict(FAMILIES[name].fixed)
        if features == fixed and not (name == "mistral" and config.window_from):
            return name
    raise NotImplementedError(
        f"no family has {', '.join(k for k, v in features.items() if v) or 'no bias and no norms of heads'} with "
        f"window={config.window} from layer {config.window_from} on; there are {', '.join(FAMILIES)}"
    )


def gguf_fields(architecture: str) -> dict[str, str]:
    """Our name of a field, and GGUF's."""
    return {ours: f"{architecture}.{theirs}" for ours, theirs in _GGUF_FIELDS.items()}


def read_config(
    file: pathlib.Path,
    given: Mapping[str, Any],
    names: Mapping[str, str],
    found: Mapping[str, Any],
    family: Family,
    *,
    tensors: int,
) -> ModelConfig:
    """The configuration of a file with the fields `given` and `tensors` tensors.

    `names` maps our fields to the file's. `found` holds our fields that are known from elsewhere. Files may leave out
    the number of KV heads, the size of a head, the rotary base and the window.
    """
    values = dict(found) | {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    allowed = kinds_of(ModelConfig)
    for ours, value in values.items():
        check(names.get(ours, ours), value, allowed[ours], file)
    optional = ("kv_heads", "head_dim", "rope_base", "window")
    if missing := sorted(theirs for ours, theirs in names.items() if ours not in values and ours not in optional):
        raise ValueError(f"{file} lacks the field {', '.join(missing)}")
    if values["layers"] > tensors:  # before a name is made for each tensor of each layer
        raise ValueError(f"{file}: {names['layers']}={values['layers']}, but there are only {tensors} tensors")
    defaults = {"kv_heads": values["q_heads"], "head_dim": values["width"] // values["q_heads"], "rope_base": 10_000.0}
    try:
        return ModelConfig(**defaults | dict(family.defaults) | values | dict(family.fixed))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def gguf_names(config: ModelConfig) -> dict[Path, str]:
    """The GGUF tensor that holds each parameter."""
    return {ours: f"{gguf}.{_ending(ours)}" for ours, gguf, _ in _parameters(config)}


def hugging_face_names(config: ModelConfig) -> dict[Path, str]:
    """The tensor of Hugging Face's files that holds each parameter."""
    return {ours: f"{theirs}.{_ending(ours)}" for ours, _, theirs in _parameters(config)}


def _parameters(config: ModelConfig) -> list[tuple[Path, str, str]]:
    layer = _LAYER + (_BIASES if config.qkv_bias else ()) + (_HEAD_NORMS if config.qk_norm else ())
    return [
        *_MODEL,
        *(() if config.tied else _HEAD),
        *(
            (("blocks", n, *ours), f"blk.{n}.{gguf}", f"model.layers.{n}.{theirs}")
            for n in range(config.layers)
            for ours, gguf, theirs in layer
        ),
    ]


def _ending(path: Path) -> str:
    return "bias" if path[-1] == "bias" else "weight"
