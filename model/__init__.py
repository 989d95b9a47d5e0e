"""A small Flax language model on block-sparse attention: train it, load a pretrained one, generate."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xsake._ground.extras import missing

if TYPE_CHECKING:
    from xsake.model.generation.generation import generate, stream
    from xsake.model.generation.hads_budget import HadsBudget
    from xsake.model.generation.sampling import Sampler
    from xsake.model.network.cache import KVCache
    from xsake.model.network.config import PRESETS, ModelConfig
    from xsake.model.network.flax_attention import attention_fn
    from xsake.model.network.transformer import Transformer
    from xsake.model.text.tokenizer import Tokenizer
    from xsake.model.training.config import TrainConfig
    from xsake.model.training.loop import train
    from xsake.model.training.trained import load_trained
    from xsake.model.weights.model_file import open_model
    from xsake.model.weights.pretrained import load_pretrained, load_tokenizer
    from xsake.model.weights.safetensors_file import save_pretrained

_PUBLIC = {
    "HadsBudget": "xsake.model.generation.hads_budget",
    "KVCache": "xsake.model.network.cache",
    "ModelConfig": "xsake.model.network.config",
    "PRESETS": "xsake.model.network.config",
    "Sampler": "xsake.model.generation.sampling",
    "Tokenizer": "xsake.model.text.tokenizer",
    "TrainConfig": "xsake.model.training.config",
    "Transformer": "xsake.model.network.transformer",
    "attention_fn": "xsake.model.network.flax_attention",
    "generate": "xsake.model.generation.generation",
    "load_pretrained": "xsake.model.weights.pretrained",
    "load_tokenizer": "xsake.model.weights.pretrained",
    "load_trained": "xsake.model.training.trained",
    "open_model": "xsake.model.weights.model_file",
    "save_pretrained": "xsake.model.weights.safetensors_file",
    "stream": "xsake.model.generation.generation",
    "train": "xsake.model.training.loop",
}

__all__ = [
    "PRESETS",
    "HadsBudget",
    "KVCache",
    "ModelConfig",
    "Sampler",
    "Tokenizer",
    "TrainConfig",
    "Transformer",
    "attention_fn",
    "generate",
    "load_pretrained",
    "load_tokenizer",
    "load_trained",
    "open_model",
    "save_pretrained",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a configuration needs no Flax, and training no tokenizer."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake.model' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "xsake":
            raise
        raise ModuleNotFoundError(missing(error.name, "model"), name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
