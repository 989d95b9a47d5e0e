"""Sorting inside a kernel: each row of a tile in the registers of one warp, by a bitonic network."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int


def sort_rows(x: Int[Array, "rows n"]) -> Int[Array, "rows n"]:
    """Sort every row upwards; n is a power of two."""
    n = x.shape[1]
    column = lax.broadcasted_iota(jnp.int32, (1, n), 1)
    size = 2
    while size <= n:
        falls = (column & size) != 0 if size < n else None
        stride = size // 2
        while stride:
            wants_larger = (column & stride) != 0
            if falls is not None:
                wants_larger = wants_larger != falls
            x = _exchange(x, stride, wants_larger)
            stride //= 2
        size *= 2
    return x


def _exchange(x: Int[Array, "rows n"], stride: int, wants_larger: Array) -> Int[Array, "rows n"]:
    """The larger of x[k] and x[k ^ stride] where `wants_larger`, the smaller elsewhere."""
    rows, n = x.shape
    # The other value is the pair's sum minus x: the compiler's fastest exchange is a sum over an axis of size 2.
    # Axes of size 1 would cost a change of layout.
    shape = tuple(size for k, size in enumerate((rows, n // (2 * stride), 2, stride)) if size > 1 or k == 0)
    axis = len(shape) - (2 if stride > 1 else 1)
    total = jnp.expand_dims(x.reshape(shape).sum(axis), axis)
    other = jnp.broadcast_to(total, shape).reshape(rows, n) - x
    return jnp.where((x < other) != wants_larger, x, other)
