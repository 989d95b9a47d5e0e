"""vmap by folding: a mapped axis becomes part of the batch, so that a kernel sees one larger call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake._backend import Call


def fold_call(size: int, call: Call, mapped: Call) -> Call:
    """The call with `size` copies along the batch; `mapped` says which leaves have a leading axis of that size."""
    batch = call.query.shape[1 if mapped.query else 0]

    def fold_field(field: dataclasses.Field) -> Any:
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


def unfold(size: int, x: Array) -> Array:
    return x.reshape(size, -1, *x.shape[1:])
