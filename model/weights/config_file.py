"""config.json in Hugging Face's layout: a model's shape, read and written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from xsake._ground.fields import check
from xsake._ground.kinds import FLAG, TABLE, TEXT, Kind, list_of, number, whole
from xsake._ground.read import read_json
from xsake.model.network import families
from xsake.model.network.config import ModelConfig
from xsake.model.network.rope import yarn_gain

# The fields that are read, except for those of the model's shape, which `families` has.
_FIELDS: dict[str, Kind] = {
    "model_type": TEXT,
    "rope_parameters": TABLE,
    "rope_scaling": TABLE,
    "rope_local_base_freq": number(above=0),
    "partial_rotary_factor": number(above=0),
    "no_rope_layers": list_of(whole(0, 1)),
    "no_rope_layer_interval": whole(),
    "sliding_window": whole(),
    "use_sliding_window": FLAG,
    "max_window_layers": whole(0),
    "sliding_window_pattern": whole(),
    "_sliding_window_pattern": whole(),
    "layer_types": list_of(TEXT),
    "query_pre_attn_scalar": number(above=0),
    "attn_logit_softcapping": number(),
    "final_logit_softcapping": number(),
    "use_bidirectional_attention": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
}
# The scalings of rotary positions: our name, Hugging Face's, and what it may hold.
_FACTOR = {"rope_factor": ("factor", number(least=1))}
_CONTEXT = {"rope_context": ("original_max_position_embeddings", whole())}
_SCALINGS: dict[str, dict[str, tuple[str, Kind]]] = {
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        "rope_low": ("low_freq_factor", number(above=0)),
        "rope_high": ("high_freq_factor", number(above=0)),
        **_CONTEXT,
    },
    "yarn": {
        **_FACTOR,
        "rope_low": ("beta_slow", number(above=0)),
        "rope_high": ("beta_fast", number(above=0)),
        "rope_gain": ("attention_factor", number(above=0)),
        **_CONTEXT,
    },
}
# The field that names the activation, and the name, by ours.
_ACTIVATIONS = {"silu": ("hidden_act", "silu"), "gelu": ("hidden_activation", "gelu_pytorch_tanh")}
_FULL, _WINDOW = "full_attention", "sliding_attention"  # kinds of layers


def open_config(path: Path) -> tuple[dict[str, Any], families.Family]:
    """(the fields of config.json that are given, the model's family)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be beside the .safetensors file: it has the model's shape")
    given = _given(read_json(path))
    for name, kind in _FIELDS.items():
        if name in given:
            check(name, given[name], kind, path)
    return given, families.find(path, "model_type", given.get("model_type"))


def read_config(path: Path, given: dict[str, Any], family: families.Family, *, tensors: int) -> ModelConfig:
    """The configuration of a model with these fields, from `open_config`, and `tensors` tensors."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    rope, window_rope = _by_kind_of_layer(path, rope)
    kinds = [each.get("rope_type", each.get("type", "default")) for each in (rope, window_rope)]
    known = ("default",) if given["model_type"] == "phi3" else ("default", *_SCALINGS)  # it calls another scaling YaRN
    field, activation = _ACTIVATIONS[family.fixed.get("activation", "silu")]
    turned = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 1))
    unsupported = {
        f"rope scaling {kinds[0]!r}": kinds[0] not in known,
        f"rope scaling {kinds[1]!r} of layers with a window": kinds[1] != "default",
        "partial_rotary_factor": turned != 1,
        "attention_bias": given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "attn_logit_softcapping": given.get("attn_logit_softcapping", False),
        "final_logit_softcapping": given.get("final_logit_softcapping", False),
        "use_bidirectional_attention": given.get("use_bidirectional_attention", False),
        field: given.get(field, activation) != activation,
    }
    if any(unsupported.values()):
        raise NotImplementedError(f"{path}: not supported: {', '.join(k for k, v in unsupported.items() if v)}")
    if rope.get("rope_theta") is not None:
        given = given | {"rope_theta": rope["rope_theta"]}
    found: dict[str, Any] = {} if kinds[0] == "default" else _scaling(path, kinds[0], rope, given)
    if (base := window_rope.get("rope_theta", given.get("rope_local_base_freq"))) is not None:
        found["window_rope_base"] = base
    config = families.read_config(path, given, families.HUGGING_FACE_FIELDS, found, family, tensors=tensors)
    return _by_layer(path, given, family, config)


def write_config(config: ModelConfig) -> tuple[dict[str, Any], families.Family]:
    """(the fields of config.json, the family of which the model is)."""
    name = families.of_config(config)
    family = families.FAMILIES[name]
    activation, name_of_activation = _ACTIVATIONS[config.activation]
    written: dict[str, Any] = {
        "architectures": [family.hugging_face_class],
        "model_type": name,
        activation: name_of_activation,
    }
    written["pad_token_id"] = None  # the default of some families lies beyond a small vocabulary
    written |= {theirs: getattr(config, ours) for ours, theirs in families.HUGGING_FACE_FIELDS.items()}
    if config.rope_factor != 1 or config.rope_gain != 1:
        scaling = {theirs: getattr(config, ours) for ours, (theirs, _) in _SCALINGS[config.rope_scaling].items()}
        written["rope_scaling"] = {"rope_type": config.rope_scaling, **scaling}
    if "window" in family.free:  # Mistral's default is a window
        written["sliding_window"] = config.window
    if config.window is not None and "window_from" in family.free:
        written |= {"use_sliding_window": True, "max_window_layers": config.window_from}
    if "unturned_every" in family.free:
        every = config.unturned_every
        written["no_rope_layers"] = [int(config.rotary_of(layer) is not None) for layer in range(config.layers)]
        written |= {} if every is None else {"no_rope_layer_interval": every}
    if "full_every" in family.free:
        written["layer_types"] = _kinds(config)
    if "scale_dim" in family.free:
        written["query_pre_attn_scalar"] = config.head_dim if config.scale_dim is None else config.scale_dim
    if "window_rope_base" in family.free:
        base = config.window_rope_base
        written["rope_local_base_freq"] = config.rope_base if base is None else base
    return written, family


def _given(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def _by_kind_of_layer(path: Path, rope: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the rotary positions of layers without a window, those of layers with one, if they are given apart)."""
    if _FULL not in rope and _WINDOW not in rope:
        return _given(rope), {}
    for name in (_FULL, _WINDOW):
        if rope.get(name) is not None:
            check(f"rope_parameters.{name}", rope[name], TABLE, path)
    return _given(rope.get(_FULL) or {}), _given(rope.get(_WINDOW) or {})


def _scaling(path: Path, kind: str, rope: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    names = _SCALINGS[kind]
    if kind == "yarn":
        if others := [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]:
            raise NotImplementedError(f"{path}: not supported: {', '.join(others)} of rope scaling 'yarn'")
        if rope.get("truncate", True) is not True:
            raise NotImplementedError(f"{path}: not supported: truncate={rope['truncate']!r} of rope scaling 'yarn'")
        rope = {"beta_slow": 1, "beta_fast": 32} | rope
        if "max_position_embeddings" in given:
            rope = {"original_max_position_embeddings": given["max_position_embeddings"]} | rope
    wanted = {theirs: kind_of for theirs, kind_of in names.values() if theirs in rope or theirs != "attention_factor"}
    if missing := [theirs for theirs in wanted if theirs not in rope]:
        raise ValueError(f"{path}: its rope scaling {kind!r} lacks {', '.join(missing)}")
    for theirs, kind_of in wanted.items():
        check(theirs, rope[theirs], kind_of, path)
    found = {ours: rope[theirs] for ours, (theirs, _) in names.items() if theirs in rope}
    if kind == "yarn":
        found.setdefault("rope_gain", yarn_gain(rope["factor"]))
    return found | {"rope_scaling": kind}


def _by_layer(path: Path, given: dict[str, Any], family: families.Family, config: ModelConfig) -> ModelConfig:
    """The configuration with what differs by layer, and with what depends on the rest."""
    changes = _window(path, given, family, config)
    if "unturned_every" in family.free:
        changes["unturned_every"] = _unturned_every(path, given, config)
    if "scale_dim" in family.free:
        scale = given.get("query_pre_attn_scalar", 256)
        changes["scale_dim"] = None if scale == config.head_dim else scale
    config = dataclasses.replace(config, **changes)
    if given.get("layer_types", _kinds(config)) != _kinds(config):
        places = f"every {config.full_every}th" if config.full_every else f"those before layer {config.window_from}"
        raise NotImplementedError(
            f"{path}: not supported: layer_types other than sliding_attention with full_attention in {places}"
            if config.window
            else f"{path}: not supported: layer_types other than full_attention"
        )
    return config


def _kinds(config: ModelConfig) -> list[str]:
    return [_FULL if config.window_of(layer) is None else _WINDOW for layer in range(config.layers)]


def _window(path: Path, given: dict[str, Any], family: families.Family, config: ModelConfig) -> dict[str, Any]:
    """The window's fields. Qwen has a window only if `use_sliding_window` says so."""
    if "window" not in family.free:
        if given.get("use_sliding_window", False):
            raise NotImplementedError(f"{path}: not supported: use_sliding_window")
        return {}
    if "full_every" in family.free:
        every = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", config.full_every))
        if (kinds := given.get("layer_types")) is not None:
            every = kinds.index(_FULL) + 1 if _FULL in kinds else None
        return {"window": given.get("sliding_window", 4096), "full_every": every}
    if "sliding_window" not in given:
        return {}
    if "window_from" not in family.free:
        return {"window": given["sliding_window"]}
    if not given.get("use_sliding_window", False):
        return {}
    if "max_window_layers" not in given:
        raise ValueError(f"{path}: a sliding_window needs max_window_layers, the layers without one")
    return {"window": given["sliding_window"], "window_from": min(given["max_window_layers"], config.layers)}


def _unturned_every(path: Path, given: dict[str, Any], config: ModelConfig) -> int | None:
    if (turned := given.get("no_rope_layers")) is None:
        return given.get("no_rope_layer_interval", config.unturned_every)
    if len(turned) < config.layers:
        raise ValueError(f"{path}: no_rope_layers has {len(turned)} numbers, fewer than layers")
    turned = turned[: config.layers]
    every = turned.index(0) + 1 if 0 in turned else None
    if turned != [int(every is None or (layer + 1) % every != 0) for layer in range(config.layers)]:
        raise NotImplementedError(f"{path}: not supported: no_rope_layers other than every n-th layer")
    return every
