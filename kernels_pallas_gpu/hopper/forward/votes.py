"""Votes of a warp: whether any of its threads has a number for which the warp must do some work."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

VOTE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)


def differs_in_warp(alpha: jax.Array, *, interpret: bool) -> jax.Array:
    """1 where the thread's warp has a number other than 1, else 0; the warps of a warpgroup may differ."""
    if interpret:
        return (alpha != 1.0).any().astype(jnp.int32)
    return _compared_in_warp(alpha, mgpu_utils.arith.CmpFPredicate.UNE, 1.0)


def exceeds_in_warp(x: jax.Array, limit: float, *, interpret: bool) -> jax.Array:
    """1 where the thread's warp has a number above the limit, else 0; NaN is not above."""
    if interpret:
        return (x > limit).any().astype(jnp.int32)
    return _compared_in_warp(x, mgpu_utils.arith.CmpFPredicate.OGT, limit)


def _compared_in_warp(x: jax.Array, predicate: Any, limit: float) -> jax.Array:
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=VOTE)
    def vote(_: Any, x: Any) -> Any:
        arith, found = mgpu_utils.arith, None
        for register in x.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                number = mgpu_utils.vector.extract(register, [], [i])
                bound = arith.constant(number.type, ir.FloatAttr.get(number.type, limit))
                test = arith.cmpf(predicate, number, bound)
                found = test if found is None else arith.ori(found, test)
        return any_in_warp(found)

    return vote(x)


def any_in_warp(found: Any) -> Any:
    """A VOTE, inside `inline_mgpu`: 1 where the condition holds for some thread of the warp, else 0."""
    i32 = ir.IntegerType.get_signless(32)
    found = mgpu_utils.nvvm.vote_sync(mgpu_utils.c(0xFFFFFFFF, i32), found, "any")
    return mgpu.FragmentedArray.splat(mgpu_utils.arith.extui(i32, found), (), is_signed=True)
