"""Llama models in Hugging Face's layout: config.json, *.safetensors, tokenizer.json in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake import _atomic
from xsake.model import llama_names
from xsake.model.config import ModelConfig
from xsake.model.fields import Flag, Kind, Table, Text, check, read_json

if TYPE_CHECKING:
    from xsake.model.tokenizer import Tokenizer
    from xsake.model.transformer import Transformer

_WEIGHTS = ("F64", "F32", "F16", "BF16")

# The fields that are read, except for those of the model's shape, which `llama_names` has.
_FIELDS: dict[str, Kind] = {
    "model_type": Text(),
    "rope_parameters": Table(),
    "rope_scaling": Table(),
    "attention_bias": Flag(),
    "mlp_bias": Flag(),
    "hidden_act": Text(),
}


class SafetensorsFolder:
    """One model, in one or several files; a tensor's numbers are read only by `read`."""

    def __init__(self, path: Path):
        import safetensors

        self.path = path if path.is_dir() else path.parent
        files = sorted(self.path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"{path} holds no .safetensors file, or something of that name that is no file")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(file, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as a safetensors file; is it cut short? ({error})") from error
            if twice := sorted(self._where.keys() & opened.keys()):
                raise ValueError(f"{file} has {twice[0]}, which another file of {self.path} has too")
            self._where |= dict.fromkeys(opened.keys(), opened)
        self.config = _read_config(self.path / "config.json", tensors=len(self._where))
        self.names = llama_names.hugging_face_names(self.config)

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
        from xsake.model import tokenizer

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
    names = llama_names.hugging_face_names(model.config)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        weight = np.asarray(variable[...])
        tensors[names[path]] = np.ascontiguousarray(weight.T if path[-1] == "kernel" else weight)
    folder.mkdir(parents=True, exist_ok=True)
    _atomic.write_text(folder / "config.json", json.dumps(_write_config(model.config), indent=2) + "\n")
    with _atomic.replacing(folder / "model.safetensors") as file:
        file.write(save(tensors))  # safetensors' save_file would bypass the lock and the fsync of `replacing`


def _write_config(config: ModelConfig) -> dict[str, Any]:
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return fixed | {theirs: getattr(config, ours) for ours, theirs in llama_names.HUGGING_FACE_FIELDS.items()}


def _read_config(path: Path, *, tensors: int) -> ModelConfig:
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be beside the .safetensors file: it has the model's shape")
    given = {name: value for name, value in read_json(path).items() if value is not None}
    for name, kind in _FIELDS.items():
        if name in given:
            check(name, given[name], kind, path)
    if given.get("model_type") != "llama":
        raise ValueError(f"{path} is of model_type {given.get('model_type')!r}; only 'llama' can be loaded")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    unsupported = {
        "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "attention_bias": given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
        "hidden_act": given.get("hidden_act", "silu") != "silu",
    }
    if any(unsupported.values()):
        raise NotImplementedError(f"{path}: not supported: {', '.join(k for k, v in unsupported.items() if v)}")
    if rope.get("rope_theta") is not None:
        given["rope_theta"] = rope["rope_theta"]
    return llama_names.read_config(path, given, llama_names.HUGGING_FACE_FIELDS, {"tied": False}, tensors=tensors)
