"""Models in Hugging Face's layout: config.json, *.safetensors, tokenizer.json in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake._ground import atomic
from xsake.model.network import families
from xsake.model.weights.config_file import open_config, read_config, write_config

if TYPE_CHECKING:
    from xsake.model.network.transformer import Transformer
    from xsake.model.text.tokenizer import Tokenizer

_WEIGHTS = ("F64", "F32", "F16", "BF16")


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
        given, self.family = open_config(self.path / "config.json")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(file, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as a safetensors file; is it cut short? ({error})") from error
            if twice := sorted(self._where.keys() & opened.keys()):
                raise ValueError(f"{file} has {twice[0]}, which another file of {self.path} has too")
            self._where |= dict.fromkeys(opened.keys(), opened)
        self.config = read_config(self.path / "config.json", given, self.family, tensors=len(self._where))
        self.names = families.hugging_face_names(self.config, self.family)

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

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some of its rows, in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        stored = self._where[name].get_slice(name)
        if (kind := stored.get_dtype()) not in _WEIGHTS:
            raise ValueError(f"{self.path}: {name} is stored as {kind}; weights are read of {', '.join(_WEIGHTS)}")
        weight = stored[rows].astype(np.float32)
        return weight + 1 if self.family.scale_less_one and weight.ndim == 1 else weight

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
    config, family = write_config(model.config)
    names = families.hugging_face_names(model.config)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        weight = np.asarray(variable[...])
        if family.scale_less_one and path[-1] == "scale":
            weight = weight - np.ones((), weight.dtype)
        tensors[names[path]] = np.ascontiguousarray(weight.T if path[-1] == "kernel" else weight)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    with atomic.replacing(folder / "model.safetensors") as file:
        file.write(save(tensors))  # safetensors' save_file would bypass the lock and the fsync of `replacing`
