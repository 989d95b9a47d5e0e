"""From a call to the Triton kernels: their arrays, their grids, and jax-triton.

An array that a call does not have is passed as the list of block numbers: the kernel is compiled without reading it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake._ground.device import compute_capability
from xsake._ground.trace import interpreting
from xsake.kernels_raw_triton.config import Config
from xsake.kernels_raw_triton.facts import Facts, Tiling


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    from xsake.kernels_raw_triton.kernel_forward import xsake_raw_forward

    tiling = config.forward
    facts = Facts.of(call, tiling, has_order=call.mask.row_order is not None)
    sink = call.mask.kv_indices if call.sink_lse is None else call.sink_lse.astype(jnp.float32)
    shapes = [
        jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype),
        jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), jnp.float32),
    ]
    grid = facts.q_tiles * facts.packs * call.batch
    out, lse = _run(xsake_raw_forward, [*_row_arrays(call), sink], shapes, grid, facts, tiling)
    return out, lse


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, Array | None]:
    assert not with_bias  # a call with a bias is refused
    return _dq(call, config.dq, lse, delta, d_out), *_dkv(call, config.dkv, lse, delta, d_out), None


def _dq(call: Call, tiling: Tiling, lse: Array, delta: Array, d_out: Array) -> Float[Array, "B T H D"]:
    from xsake.kernels_raw_triton.kernel_dq import xsake_raw_dq

    facts = Facts.of(call, tiling, has_order=call.mask.row_order is not None)
    shape = jax.ShapeDtypeStruct(call.query.shape, call.query.dtype)
    grid = facts.q_tiles * facts.packs * call.batch
    given = [*_row_arrays(call), d_out, _in_units(lse, facts), delta]
    (found,) = _run(xsake_raw_dq, given, [shape], grid, facts, tiling)
    return found


def _dkv(
    call: Call, tiling: Tiling, lse: Array, delta: Array, d_out: Array
) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K Dv"]]:
    from xsake.kernels_raw_triton.kernel_dkv import xsake_raw_dkv

    mask = call.mask
    facts = Facts.of(call, tiling, has_order=mask.col_order is not None)
    lists = (mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order, mask.q_bitmap)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.key, call.value)]
    grid = facts.kv_tiles * facts.kv_heads * call.batch
    given = [*_arrays(call, lists), d_out, _in_units(lse, facts), delta]
    dk, dv = _run(xsake_raw_dkv, given, shapes, grid, facts, tiling)
    return dk, dv


def _row_arrays(call: Call) -> list[Array]:
    mask = call.mask
    return _arrays(call, (mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.row_order, mask.kv_bitmap))


def _arrays(call: Call, lists: tuple) -> list[Array]:
    given = (call.query, call.key, call.value, *lists, call.mask.bitmaps, call.q_segments, call.kv_segments)
    return [lists[0] if x is None else x for x in given]


def _in_units(lse: Array, facts: Facts) -> Array:
    """A row that attends nothing gets +inf: its weights are exp(-inf) = 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * jnp.float32(facts.one))


def _run(kernel: Any, arrays: list, shapes: Sequence[Any], grid: int, facts: Facts, tiling: Tiling) -> Sequence[Array]:
    if math.prod(shapes[0].shape) == 0:
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]
    if interpreting():
        from xsake.kernels_raw_triton import interpreted

        return interpreted.run(kernel, arrays, shapes, grid, facts)
    capability = compute_capability()
    return _triton_call()(
        *arrays,
        kernel=kernel,
        out_shape=shapes,
        grid=(grid, 1, 1),
        name=kernel.__name__,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        compute_capability=None if capability is None else int(capability.replace(".", "")),
        F=facts,
    )


def _triton_call() -> Any:
    """`jax_triton.triton_call`. Its import takes a setting away from other users of Triton, who get it back."""
    before = os.environ.get("TRITON_CACHE_DIR")
    from jax_triton import triton_call

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return triton_call
