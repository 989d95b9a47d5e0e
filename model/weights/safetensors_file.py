"""Models in Hugging Face's layout: config.json, *.safetensors, tokenizer.json in one folder."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake._ground import atomic
from xsake._ground.fields import check
from xsake._ground.kinds import FLAG, TABLE, TEXT, Kind, list_of, number, whole
from xsake._ground.read import read_json
from xsake.model.network import families
from xsake.model.network.config import ModelConfig

if TYPE_CHECKING:
    from xsake.model.network.transformer import Transformer
    from xsake.model.text.tokenizer import Tokenizer

_WEIGHTS = ("F64", "F32", "F16", "BF16")

# The fields that are read, except for those of the model's shape, which `families` has.
_FIELDS: dict[str, Kind] = {
    "model_type": TEXT,
    "rope_parameters": TABLE,
    "rope_scaling": TABLE,
    "sliding_window": whole(),
    "use_sliding_window": FLAG,
    "max_window_layers": whole(0),
    "layer_types": list_of(TEXT),
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "hidden_act": TEXT,
}
# Llama 3's scaling of rotary positions: our name, Hugging Face's, and what it may hold.
_LLAMA3: dict[str, tuple[str, Kind]] = {
    "rope_factor": ("factor", number(least=1)),
    "rope_low": ("low_freq_factor", number(above=0)),
    "rope_high": ("high_freq_factor", number(above=0)),
    "rope_context": ("original_max_position_embeddings", whole()),
}


class SafetensorsFolder:
    """One model, in one or several files; a tensor's numbers are read only by `read`."""

    def __init__(self, path: Path):
        import safetensors

        self.path = path if path.is_dir() else path.parent
        files = sorted(self.path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} holds no .safetensors file and no run's checkpoints")
        if wrong := [file for file in files if not file.is_file()]:
            raise ValueError(f"{wrong[0]} is no file")
        # First: a model that cannot be loaded is refused before its weights are looked at.
        given, self.family = _open_config(self.path / "config.json")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(file, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as a safetensors file; is it cut short? ({error})") from error
            if twice := sorted(self._where.keys() & opened.keys()):
                raise ValueError(f"{file} has {twice[0]}, which another file of {self.path} has too")
            self._where |= dict.fromkeys(opened.keys(), opened)
        self.config = _read_config(self.path / "config.json", given, self.family, tensors=len(self._where))
        self.names = families.hugging_face_names(self.config)

    @property
    def tensor_names(self) -> set[str]:
        """All tensors that do not follow from others: not rotary frequencies, nor the copy of a tied embedding."""
        derived = {"lm_head.weight"} if self.config.tied else set()
        return {name for name in self._where if name not in derived and not name.endswith("rotary_emb.inv_freq")}

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way, such as {"BF16": 272}."""
        names = [opened.get_slice(name).get_dtype() for name, opened in self._where.items()]
        return {name: names.count(name) for name in sorted(set(names))}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        kind = self._where[name].get_slice(name).get_dtype()
        if kind not in _WEIGHTS:
            raise ValueError(f"{self.path}: {name} is stored as {kind}; weights are read of {', '.join(_WEIGHTS)}")
        return self._where[name].get_tensor(name).astype(np.float32)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the same folder."""
        from xsake.model.text import tokenizer

        return tokenizer.from_folder(self.path)


def save_pretrained(model: Transformer, folder: str | os.PathLike) -> None:
    """Write config.json and model.safetensors, which `load_pretrained` and other libraries read, in the weights' dtype.

    The folder must not hold a model yet. For a tokenizer, put its tokenizer.json into the folder.
    """
    from flax import nnx
    from safetensors.numpy import save

    folder = Path(folder)
    if folder.exists() and any(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} already holds a model")
    config, names = _write_config(model.config), families.hugging_face_names(model.config)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        weight = np.asarray(variable[...])
        tensors[names[path]] = np.ascontiguousarray(weight.T if path[-1] == "kernel" else weight)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    with atomic.replacing(folder / "model.safetensors") as file:
        file.write(save(tensors))  # safetensors' save_file would bypass the lock and the fsync of `replacing`


def _write_config(config: ModelConfig) -> dict[str, Any]:
    name = families.of_config(config)
    written: dict[str, Any] = {
        "architectures": [families.FAMILIES[name].hugging_face_class],
        "model_type": name,
        "hidden_act": "silu",
    }
    written |= {theirs: getattr(config, ours) for ours, theirs in families.HUGGING_FACE_FIELDS.items()}
    if config.rope_factor != 1:
        scaling = {theirs: getattr(config, ours) for ours, (theirs, _) in _LLAMA3.items()}
        written["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if name != "llama":  # Mistral's default is a window
        written["sliding_window"] = config.window
    if config.window is not None and name != "mistral":
        written |= {"use_sliding_window": True, "max_window_layers": config.window_from}
    return written


def _open_config(path: Path) -> tuple[dict[str, Any], families.Family]:
    """(the fields of config.json that are given, the model's family)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be beside the .safetensors file: it has the model's shape")
    given = {name: value for name, value in read_json(path).items() if value is not None}
    for name, kind in _FIELDS.items():
        if name in given:
            check(name, given[name], kind, path)
    return given, families.find(path, "model_type", given.get("model_type"))


def _read_config(path: Path, given: dict[str, Any], family: families.Family, *, tensors: int) -> ModelConfig:
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        f"rope scaling {kind!r}": kind not in ("default", "llama3"),
        "attention_bias": given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "hidden_act": given.get("hidden_act", "silu") != "silu",
    }
    if any(unsupported.values()):
        raise NotImplementedError(f"{path}: not supported: {', '.join(k for k, v in unsupported.items() if v)}")
    if rope.get("rope_theta") is not None:
        given = given | {"rope_theta": rope["rope_theta"]}
    found = {"tied": False, **(_llama3(path, rope) if kind == "llama3" else {})}
    names = families.HUGGING_FACE_FIELDS
    config = families.read_config(path, given, names, found, family, tensors=tensors)
    return dataclasses.replace(config, **_window(path, given, config.layers))


def _llama3(path: Path, rope: dict[str, Any]) -> dict[str, Any]:
    if missing := [theirs for theirs, _ in _LLAMA3.values() if theirs not in rope]:
        raise ValueError(f"{path}: its rope scaling 'llama3' lacks {', '.join(missing)}")
    for theirs, kind in _LLAMA3.values():
        check(theirs, rope[theirs], kind, path)
    return {ours: rope[theirs] for ours, (theirs, _) in _LLAMA3.items()}


def _window(path: Path, given: dict[str, Any], layers: int) -> dict[str, Any]:
    """The window's fields. Mistral has a window if the file gives one, Qwen only if `use_sliding_window` says so."""
    of_mistral = given["model_type"] == "mistral"
    if "sliding_window" not in given or given["model_type"] == "llama":
        return {}
    if not of_mistral and not given.get("use_sliding_window", False):
        return {}
    if not of_mistral and "max_window_layers" not in given:
        raise ValueError(f"{path}: a sliding_window needs max_window_layers, the layers without one")
    first = 0 if of_mistral else min(given["max_window_layers"], layers)
    kinds = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if given.get("layer_types", kinds) != kinds:
        raise NotImplementedError(
            f"{path}: not supported: layer_types other than full_attention first and sliding_attention from layer "
            f"{first} on"
        )
    return {"window": given["sliding_window"], "window_from": first}
