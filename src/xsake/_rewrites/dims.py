"""What the dimensions of a call's arrays stand for: how a call is cut over devices, or into pieces of its heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array

from xsake.backend.contract import Call
from xsake.hads.mask.block_mask import BlockMask

# "b" the batch, "h" query heads, "k" K/V heads where they are fewer, "t" and "s" tokens, "d" and "e" channels, and
# None for a dimension that is never cut: of size 1, or of lists.
Dims = tuple[str | None, ...]


def call_dims(call: Call) -> Call:
    """The tree of a call with `Dims` at every array, from how `Call` declares its fields."""

    def dims(field: dataclasses.Field, x: Array) -> Dims:
        declared = field.metadata.get("dims", "b").split()
        # An array of keys and values has 2 K heads: these are not cut with the query heads, even where K is H.
        kv_heads = "k" if call.joined_kv else _heads(call, call.kv_heads)
        names: list[str | None] = [kv_heads if name == "k" else name for name in declared]
        if call.page_table is not None and field.name in ("key", "value"):
            names[:2] = [None, None]  # every device has all pages
        return _named(x, names)

    def of(field: dataclasses.Field) -> Any:
        value = getattr(call, field.name)
        if isinstance(value, BlockMask):
            return jax.tree.map(lambda x: _named(x, ["b", _heads(call, value.heads)]), value)
        return jax.tree.map(lambda x: dims(field, x), value)

    return dataclasses.replace(call, **{field.name: of(field) for field in call.array_fields()})


def _heads(call: Call, heads: int) -> str:
    return "h" if heads == call.q_heads else "k"


def _named(x: Array, names: list[str | None]) -> Dims:
    """The names, None for a dimension of size 1, and for the dimensions after the last name."""
    padded = (*names, *(None,) * (x.ndim - len(names)))
    return tuple(None if size == 1 else name for size, name in zip(x.shape, padded, strict=True))


def flat_dims(tree: Any) -> list[Dims]:
    def is_dims(x: Any) -> bool:
        return isinstance(x, tuple) and bool(x) and all(dim is None or isinstance(dim, str) for dim in x)

    return jax.tree.leaves(tree, is_leaf=is_dims)
