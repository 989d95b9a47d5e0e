"""The families of models that are read: what sets each apart, and its names in GGUF and in Hugging Face's files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from xsake._ground.fields import check, kinds_of
from xsake._ground.kinds import LARGEST_INT
from xsake.model.network.config import ModelConfig

Path = tuple[Any, ...]  # of a parameter, as `nnx.to_flat_state` has it: ("blocks", 0, "mlp", "up", "kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture, as a configuration of the one transformer.

    - `gguf`: its name in GGUF files, None if they call it by the name of another family.
    - `fixed`: the fields of `ModelConfig` that the architecture fixes.
    - `free`: the fields that tell architectures apart and that its files may give.
    - `defaults`: what files may leave out.
    - `gguf_pairs`: GGUF files store the features of queries and keys in rotary pairs (0, 1), (2, 3), ...
    - `scale_less_one`: Hugging Face's files hold the scales of norms less 1. GGUF files hold the scales.
    - `joined`: the parameters of a layer that lie in one tensor with others, row after row: the names of that tensor.
    """

    hugging_face_class: str
    gguf: str | None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    free: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gguf_pairs: bool = False
    scale_less_one: bool = False
    joined: Mapping[Path, tuple[str, str]] = dataclasses.field(default_factory=dict)


_PHI3_JOINED: dict[Path, tuple[str, str]] = {
    **{("attention", name, "kernel"): ("attn_qkv", "self_attn.qkv_proj") for name in ("query", "key", "value")},
    **{("mlp", name, "kernel"): ("ffn_up", "mlp.gate_up_proj") for name in ("gate", "up")},
}
# By Hugging Face's `model_type`, the simplest first.
FAMILIES = {
    "llama": Family(hugging_face_class="LlamaForCausalLM", gguf="llama", gguf_pairs=True),
    "mistral": Family(hugging_face_class="MistralForCausalLM", gguf=None, free=("window",)),
    "qwen2": Family(
        hugging_face_class="Qwen2ForCausalLM", gguf="qwen2", fixed={"qkv_bias": True}, free=("window", "window_from")
    ),
    "qwen3": Family(
        hugging_face_class="Qwen3ForCausalLM",
        gguf="qwen3",
        fixed={"qk_norm": True},
        free=("window", "window_from"),
        defaults={"head_dim": 128},
    ),
    "smollm3": Family(
        hugging_face_class="SmolLM3ForCausalLM",
        gguf="smollm3",
        free=("unturned_every",),
        defaults={"unturned_every": 4, "rope_base": 2e6, "norm_eps": 1e-6, "tied": True},
        gguf_pairs=True,
    ),
    "phi3": Family(hugging_face_class="Phi3ForCausalLM", gguf="phi3", free=("window",), joined=_PHI3_JOINED),
    "gemma3_text": Family(
        hugging_face_class="Gemma3ForCausalLM",
        gguf="gemma3",
        fixed={"qk_norm": True, "post_norms": True, "activation": "gelu", "scaled_embedding": True},
        free=("window", "full_every", "window_rope_base", "scale_dim"),
        defaults={
            "head_dim": 256,
            "full_every": 6,
            "rope_base": 1e6,
            "window_rope_base": 1e4,
            "norm_eps": 1e-6,
            "tied": True,
        },
        scale_less_one=True,
    ),
}
# The fields of `ModelConfig` by which architectures differ.
_TELLING = (
    "qkv_bias",
    "qk_norm",
    "window",
    "window_from",
    "full_every",
    "window_rope_base",
    "unturned_every",
    "post_norms",
    "activation",
    "scaled_embedding",
    "scale_dim",
)

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
    "window_rope_base": "rope.freq_base_swa",
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
# With these norms, Hugging Face calls that before the MLP by another name.
_POST_NORMS = (
    (("attention_post_norm", "scale"), "post_attention_norm", "post_attention_layernorm"),
    (("mlp_norm", "scale"), "ffn_norm", "pre_feedforward_layernorm"),
    (("mlp_post_norm", "scale"), "post_ffw_norm", "post_feedforward_layernorm"),
)


def find(file: pathlib.Path, what: str, name: Any) -> Family:
    """The family of that name. ValueError if there is none; `what` says what the file calls the name."""
    by_gguf = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
    known: Mapping[str, Family] = by_gguf if what == "architecture" else FAMILIES
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{file} is of {what} {name!r}, which is not known; these can be loaded: {', '.join(known)}")
    return known[name]


def of_config(config: ModelConfig) -> str:
    """The name of the simplest family that has such models."""
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    own = {name: getattr(config, name) for name in _TELLING if getattr(config, name) != defaults[name]}
    for name, family in FAMILIES.items():
        rest = {field: value for field, value in own.items() if field not in family.free}
        if rest == family.fixed:
            return name
    raise NotImplementedError(
        f"no family has {', '.join(f'{name}={value}' for name, value in own.items())}; there are {', '.join(FAMILIES)}"
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
    the number of KV heads, the size of a head, the rotary base, the window, and whether the embedding is tied.
    """
    values = dict(found) | {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    allowed = kinds_of(ModelConfig)
    for ours, value in values.items():
        check(names.get(ours, ours), value, allowed[ours], file)
    values = dict(family.defaults) | values | dict(family.fixed)
    optional = ("kv_heads", "head_dim", "rope_base", "window", "window_rope_base", "tied")
    if missing := sorted(theirs for ours, theirs in names.items() if ours not in values and ours not in optional):
        raise ValueError(f"{file} lacks the field {', '.join(missing)}")
    if values["layers"] > tensors:  # before a name is made for each tensor of each layer
        raise ValueError(f"{file}: {names['layers']}={values['layers']}, but there are only {tensors} tensors")
    if values.get("rope_scaling") == "yarn":  # many files keep the length that the model had before
        values["context"] = max(
            values["context"], min(int(values["rope_factor"] * values["rope_context"]), LARGEST_INT)
        )
    defaults = {"kv_heads": values["q_heads"], "head_dim": values["width"] // values["q_heads"], "tied": False}
    try:
        return ModelConfig(**defaults | values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def gguf_names(config: ModelConfig, family: Family | None = None) -> dict[Path, str]:
    """The GGUF tensor that holds each parameter, in a file of `family`; None for one that joins no parameters."""
    return {ours: f"{gguf}.{_ending(ours)}" for ours, gguf, _ in _parameters(config, family)}


def hugging_face_names(config: ModelConfig, family: Family | None = None) -> dict[Path, str]:
    """The tensor of Hugging Face's files that holds each parameter, as in `gguf_names`."""
    return {ours: f"{theirs}.{_ending(ours)}" for ours, _, theirs in _parameters(config, family)}


def _parameters(config: ModelConfig, family: Family | None) -> list[tuple[Path, str, str]]:
    parts = _LAYER + (_BIASES if config.qkv_bias else ()) + (_HEAD_NORMS if config.qk_norm else ())
    parts += _POST_NORMS if config.post_norms else ()
    joined = {} if family is None else family.joined
    layer = {ours: joined.get(ours, names) for ours, *names in parts}
    return [
        *_MODEL,
        *(() if config.tied else _HEAD),
        *(
            (("blocks", n, *ours), f"blk.{n}.{gguf}", f"model.layers.{n}.{theirs}")
            for n in range(config.layers)
            for ours, (gguf, theirs) in layer.items()
        ),
    ]


def _ending(path: Path) -> str:
    return "bias" if path[-1] == "bias" else "weight"
