"""vmap by folding: a mapped axis becomes part of the batch, so that a kernel sees one larger call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.backend.contract import Call


def fold_call(size: int, call: Call, mapped: Call) -> Call:
    """The call with `size` copies along the batch; `mapped` says which leaves have a leading axis of that size."""
    batch = call.query.shape[1 if mapped.query else 0]
    paged = {} if call.page_table is None else _fold_pages(size, batch, call, mapped)

    def fold_field(field: dataclasses.Field) -> Any:
        if call.page_table is not None and field.name in ("key", "value", "page_table"):
            return paged[field.name]
        share = field.metadata.get("shared_batch", False)
        return jax.tree.map(
            lambda x, m: fold(size, batch, x, m, share=share), getattr(call, field.name), getattr(mapped, field.name)
        )

    return dataclasses.replace(call, **{field.name: fold_field(field) for field in call.array_fields()})


def fold(size: int, batch: int, x: Array, mapped: bool, *, share: bool = False) -> Array:
    """[size, b, ...] if mapped, else [b, ...], with b = 1 or batch, to [size * batch, ...].

    With `share`, an unmapped batch of 1 stays as it is.
    """
    if not mapped and share and x.shape[0] == 1:
        return x
    inner = x.shape[1:] if not mapped else x.shape[2:]
    full = jnp.broadcast_to(x if mapped else x[None], (size, batch, *inner))
    return full.reshape(size * batch, *inner)


def _fold_pages(size: int, batch: int, call: Any, mapped: Any) -> dict[str, Array]:
    """Key, value and page table: pages that are mapped follow one another, and the tables count on."""
    table = fold(size, batch, call.page_table, mapped.page_table)
    if not mapped.key and not mapped.value:
        return dict(key=call.key, value=call.value, page_table=table)
    count = call.key.shape[1 if mapped.key else 0]
    key, value = (fold(size, count, x, m) for x, m in ((call.key, mapped.key), (call.value, mapped.value)))
    first = jnp.repeat(jnp.arange(size, dtype=table.dtype) * count, batch)
    return dict(key=key, value=value, page_table=jnp.clip(table, 0, count - 1) + first[:, None])


def unfold(size: int, x: Array) -> Array:
    return x.reshape(size, -1, *x.shape[1:])
