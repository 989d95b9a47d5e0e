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

if TYPE_CHECKING:
    from xsake.model.tokenizer import Tokenizer
    from xsake.model.transformer import Transformer


class SafetensorsFolder:
    """One model, in one or several files; nothing is read before it is asked for."""

    def __init__(self, path: Path):
        import safetensors

        self.path = path if path.is_dir() else path.parent
        files = sorted(self.path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} holds no .safetensors file")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(file, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} cannot be read as a safetensors file; is it cut short? ({error})") from error
            self._where |= dict.fromkeys(opened.keys(), opened)
        self.config = _read_config(self.path / "config.json")
        self.names = llama_names.hugging_face_names(self.config)

    @property
    def tensor_names(self) -> set[str]:
        """All but what follows from the rest: rotary frequencies of old files, and the copy of a tied embedding."""
        derived = {"lm_head.weight"} if self.config.tied else set()
        return {name for name in self._where if name not in derived and not name.endswith("rotary_emb.inv_freq")}

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way, such as {"BF16": 272}."""
        names = [opened.get_slice(name).get_dtype() for name, opened in self._where.items()]
        return {name: names.count(name) for name in sorted(set(names))}

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        return self._where[name].get_tensor(name).astype(np.float32)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the same folder."""
        from xsake.model import tokenizer

        return tokenizer.from_folder(self.path)


def save_pretrained(model: Transformer, folder: str | os.PathLike) -> None:
    """Write config.json and model.safetensors, which `load_pretrained` and other libraries read, in the weights' dtype.

    The folder must not hold a model yet. Put the tokenizer's tokenizer.json beside them.
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
        file.write(save(tensors))  # its save_file writes another file and renames it, past the lock and the fsync


# Ours and Hugging Face's.
_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}


def _write_config(config: ModelConfig) -> dict[str, Any]:
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    return fixed | fields | {"rope_theta": config.rope_base}


def _read_config(path: Path) -> ModelConfig:
    try:
        given = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} must be beside the .safetensors file: it has the model's shape") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
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
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": given.get("num_attention_heads")}
    if "head_dim" not in given and {"hidden_size", "num_attention_heads"} <= given.keys():
        defaults["head_dim"] = given["hidden_size"] // given["num_attention_heads"]
    given = defaults | {k: v for k, v in given.items() if v is not None}
    if missing := sorted(set(_FIELDS.values()) - given.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    base = rope.get("rope_theta") or given.get("rope_theta") or 10_000.0
    return ModelConfig(rope_base=float(base), **{ours: given[theirs] for ours, theirs in _FIELDS.items()})
