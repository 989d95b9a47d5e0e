"""The study's model: its file, and attention for a model in float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

import xsake
from xsake._ground import atomic


def attention_16(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """`xsake.attention` for a model in float32: inputs that are not in 16 bits are rounded to bfloat16."""
    if query.dtype != jnp.float32:
        return xsake.attention(query, key, value, **options)
    narrow = (x.astype(jnp.bfloat16) for x in (query, key, value))
    return xsake.attention(*narrow, **options).astype(jnp.float32)


def join(inputs: Path, work: Path) -> Path:
    """The model's file, joined if it came in pieces."""
    if whole := sorted(inputs.glob("*.gguf")):
        return whole[0]
    pieces = sorted(inputs.glob("*.gguf.[0-9][0-9]"))
    if not pieces:
        raise SystemExit(f"{inputs} has neither *.gguf nor *.gguf.00, ...")
    path = work / pieces[0].stem
    work.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with atomic.replacing(path) as sink:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, sink, 1 << 24)
    return path
