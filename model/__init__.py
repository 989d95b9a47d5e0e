"""A small Flax language model on block-sparse attention: train it, load a pretrained one, generate."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.model.cache import KVCache
    from xsake.model.config import PRESETS, ModelConfig
    from xsake.model.flax_attention import attention_fn
    from xsake.model.generation import generate, stream
    from xsake.model.hads_budget import HadsBudget
    from xsake.model.model_file import open_model
    from xsake.model.pretrained import load_pretrained, load_tokenizer
    from xsake.model.safetensors_file import save_pretrained
    from xsake.model.sampling import Sampler
    from xsake.model.tokenizer import Tokenizer
    from xsake.model.train_config import TrainConfig
    from xsake.model.train_loop import train
    from xsake.model.trained import load_trained
    from xsake.model.transformer import Transformer

_PUBLIC = {
    "HadsBudget": "xsake.model.hads_budget",
    "KVCache": "xsake.model.cache",
    "ModelConfig": "xsake.model.config",
    "PRESETS": "xsake.model.config",
    "Sampler": "xsake.model.sampling",
    "Tokenizer": "xsake.model.tokenizer",
    "TrainConfig": "xsake.model.train_config",
    "Transformer": "xsake.model.transformer",
    "attention_fn": "xsake.model.flax_attention",
    "generate": "xsake.model.generation",
    "load_pretrained": "xsake.model.pretrained",
    "load_tokenizer": "xsake.model.pretrained",
    "load_trained": "xsake.model.trained",
    "open_model": "xsake.model.model_file",
    "save_pretrained": "xsake.model.safetensors_file",
    "stream": "xsake.model.generation",
    "train": "xsake.model.train_loop",
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
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
