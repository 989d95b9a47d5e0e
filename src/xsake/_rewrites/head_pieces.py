"""HeadPieces: a call in pieces of its heads, one after another; and sums in at least float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._rewrites.dims import Dims, call_dims, flat_dims
from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call


class HeadPieces(Rewrite):
    """The call itself, run one piece of its heads after another: temporary memory is that of one piece."""

    def __init__(self, given: Call, pieces: int) -> None:
        super().__init__(given)
        self.pieces = pieces

    def around(self, run: Callable[..., tuple]) -> Callable[..., tuple]:
        dims = call_dims(self.given)
        batch, tokens, heads, _ = dims.query
        rows, outputs = (batch, heads, tokens), (batch, tokens, heads, dims.value[3])

        def forward(call: Call) -> tuple:
            return by_heads(run, (call,), (dims,), (outputs, rows), self.pieces)

        def backward(call: Call, *given: Array) -> tuple:
            results = (dims.query, dims.key, dims.value, dims.bias)
            return by_heads(run, (call, *given), (dims, rows, rows, outputs), results, self.pieces)

        return lambda call, *given: backward(call, *given) if given else forward(call)


def by_heads(run: Callable, given: tuple, given_dims: tuple, result_dims: tuple, pieces: int) -> tuple:
    """`run(*given)` on one piece of the heads after another. Results without heads are sums over the pieces.

    `result_dims` may go on after the last result: a gradient of the bias is there only if asked for.
    """
    if pieces == 1:
        return run(*given)
    leaves, tree = jax.tree.flatten(given)
    axes = [_head_axis(dims) for dims in flat_dims(given_dims)]
    cut = {i: _cut(leaves[i], axis, pieces) for i, axis in enumerate(axes) if axis is not None}

    def piece(parts: dict[int, Array]) -> tuple:
        return run(*jax.tree.unflatten(tree, [parts.get(i, x) for i, x in enumerate(leaves)]))

    results = jax.lax.map(piece, cut)
    return tuple(_join(x, _head_axis(dims)) for x, dims in zip(results, result_dims, strict=False))


def _head_axis(dims: Dims) -> int | None:
    return next((axis for axis, dim in enumerate(dims) if dim in ("h", "k")), None)


def _cut(x: Array, axis: int, pieces: int) -> Array:
    return jnp.moveaxis(x.reshape(*x.shape[:axis], pieces, -1, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, axis: int | None) -> Array:
    if axis is None:
        return x.sum(0)
    moved = jnp.moveaxis(x, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def wide(x: Array) -> Array:
    return x.astype(np.promote_types(x.dtype, jnp.float32))
