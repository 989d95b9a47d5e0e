"""Profiles that find themselves: kept in the user's cache under a key made from the model, or shipped under it."""

from __future__ import annotations

import hashlib
import math
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake._ground.cache import cache_folder

_ENTRIES = 64  # of each array


def key_of(model: Any) -> str:
    """A short name made from a model's weights, a pytree of arrays: from their shapes, and from some of their entries.

    Entries count as bfloat16, so that a model has one key in float32 and in bfloat16.

    >>> weights = {"embed": np.ones((8, 4), np.float32)}
    >>> key_of(weights) == key_of({"embed": jnp.ones((8, 4), jnp.bfloat16)})
    True
    >>> key_of(weights) == key_of({"embed": 2 * weights["embed"]})
    False
    """
    arrays = [x for x in jax.tree.leaves(model) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    digest = hashlib.sha256()
    for shape, some in zip([x.shape for x in arrays], jax.device_get(_some(arrays)), strict=True):
        digest.update(repr(tuple(shape)).encode() + np.asarray(some).view(np.uint16).tobytes())
    return digest.hexdigest()[:20]


@jax.jit
def _some(arrays: list[Any]) -> list[jax.Array]:
    def entries(x: Any) -> jax.Array:
        places = np.unravel_index(np.linspace(0, x.size - 1, min(_ENTRIES, x.size)).astype(np.int64), x.shape)
        return x[tuple(place.astype(np.int32) for place in places)].astype(jnp.bfloat16)

    return [entries(x) for x in arrays if x.size]


def folder() -> Path:
    return cache_folder() / "profiles"


def kept(key: str, length: int, blocks: str) -> Path:
    """The file of a model's profile from texts of `length` tokens."""
    return folder() / f"{key}-{blocks}-{length}.json"


def find[Profile](kind: type[Profile], key: str, length: int) -> Profile | None:
    """The profile of a model with this key from texts about as long as `length`: from the user's cache, or the shipped
    one; None if there is none. A file of the cache that cannot be read is left out, with a warning."""
    for path in sorted(
        folder().glob(f"{key}-*.json"), key=lambda path: apart(int(path.stem.rpartition("-")[2]), length)
    ):
        try:
            return kind.load(path)  # type: ignore[attr-defined, no-any-return]
        except ValueError as error:
            warnings.warn(f"{error}: it is left out", RuntimeWarning, stacklevel=3)
    keys = (resources.files(__package__) / "shipped" / "keys.txt").read_text()
    names = dict(line.split() for line in keys.splitlines())
    return kind.shipped(names[key], length) if key in names else None  # type: ignore[attr-defined, no-any-return]


def apart(tokens: int, length: int) -> float:
    """How far a profile from texts of `tokens` is from serving `length` tokens: by their ratio."""
    return abs(math.log(max(tokens, 1) / max(length, 1)))
