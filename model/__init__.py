"""A small Flax language model on block-sparse attention: train it, load a pretrained one, generate."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.model.config import PRESETS, ModelConfig
    from xsake.model.transformer import Transformer

_PUBLIC = {
    "ModelConfig": "xsake.model.config",
    "PRESETS": "xsake.model.config",
    "Transformer": "xsake.model.transformer",
}

__all__ = ["PRESETS", "ModelConfig", "Transformer"]


def __getattr__(name: str) -> Any:
    """Imported when first used: a configuration needs no Flax, and training no tokenizer."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake.model' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
