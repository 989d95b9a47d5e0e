"""The online softmax of the Hopper forward: the weights of a tile of keys, and the sums over all tiles so far.

The tensor core waits while the softmax's instructions are issued, and a fifth of them look for the maximum of a row.
Any number near the maximum serves as well, because float32 and the 16-bit weights are as exact for sums that are
thousands of times as large. So a tile is first weighed by the maximum of the tiles before it. If the sum of a row is
then large, some logit is far above that maximum, and the tile is weighed again.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.forward.config import WG_ROWS
from xsake.kernels_pallas_gpu.hopper.forward.plan import ForwardPlan
from xsake.kernels_pallas_gpu.hopper.forward.votes import differs_in_warp, exceeds_in_warp
from xsake.kernels_pallas_gpu.hopper.tile.products import wgmma_full
from xsake.kernels_pallas_gpu.hopper.tile.vectors import per_row

# The running maximum of a row starts here. From -inf, a row with no element yet would compute -inf - -inf.
LOWEST = -1e38
# An accumulator's layout repeats after 8 columns: a thread holds all of a row's columns c, c + 8, c + 16, ...
LANE_COLUMNS = 8
# A row keeps its maximum until a logit exceeds it by so many powers of two, so that the output is seldom rescaled.
RISE = 8.0
# A tile is weighed again where a row's sum over the tile, or a lane's part of that sum, is larger. No weight exceeds
# the sum, and float16 can hold this number.
LARGE = 2.0**15


class Sums(NamedTuple):
    """Sums of 64 rows.

    `out`: of the weighted values. `maximum`: the running maximum of the logits, as powers of two; it may lag the true
    one by up to 15. `total`: of the weights, one per lane where `ForwardPlan.lane_sums`.
    """

    out: Any
    maximum: Any
    total: Any


class Softmax:
    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan

    def nothing(self) -> Sums:
        """Before the first key."""
        out = wgmma_full((WG_ROWS, self.plan.v_head_dim), 0.0)
        return Sums(out, wgmma_full((WG_ROWS,), LOWEST), self._no_total())

    def weigh(self, sums: Sums, logits: Any) -> tuple[Sums, Any]:
        """(sums, weights of the tile). The sums' maximum and total include the tile; the output does not yet."""
        largest = self._largest(sums, logits)
        return self._weigh_by(jnp.where(largest > sums.maximum + RISE, largest, sums.maximum), sums, logits)

    def weigh_by_old_maximum(self, sums: Sums, logits: Any) -> tuple[Sums, Any]:
        """As `weigh`, but looks for the maximum only where the sum of some row of the warp is large.

        Even then, rows with small sums keep their maximum: no row's result depends on the rows beside it.
        """
        weights = self._weights(logits, sums.maximum)
        of_tile = self._added(self._no_total(), weights)
        large = exceeds_in_warp(of_tile, LARGE, interpret=bool(self.plan.interpret))
        # Without this the compiler would round the weights after the loop, and until then keep them beside the logits.
        weights = lax.optimization_barrier(weights.astype(self.plan.dtype))
        found = sums._replace(total=sums.total + of_tile), weights

        def weigh_again(_: Any, __: Any) -> tuple[Sums, Any]:
            of_rows = of_tile.max(axis=1) if self.plan.lane_sums else of_tile
            return self._weigh_by(jnp.where(of_rows > LARGE, self._largest(sums, logits), sums.maximum), sums, logits)

        return lax.fori_loop(0, large, weigh_again, found)

    def total_of_rows(self, sums: Sums) -> Sums:
        return sums._replace(total=sums.total.sum(axis=1)) if self.plan.lane_sums else sums

    def _largest(self, sums: Sums, logits: Any) -> Any:
        return jnp.maximum(sums.maximum, logits.max(axis=1) * jnp.float32(self.plan.to_log2))

    def _weigh_by(self, maximum: Any, sums: Sums, logits: Any) -> tuple[Sums, Any]:
        factor = jnp.exp2(sums.maximum - maximum)
        weights = self._weights(logits, maximum)

        def rescale(_: Any, of_sums: Any) -> Any:
            out, total = of_sums
            of_rows = per_row(factor, total.shape) if self.plan.lane_sums else factor
            return out * per_row(factor, out.shape), total * of_rows

        moved = differs_in_warp(factor, interpret=bool(self.plan.interpret))
        out, total = lax.fori_loop(0, moved, rescale, (sums.out, sums.total))
        return Sums(out, maximum, self._added(total, weights)), weights.astype(self.plan.dtype)

    def _weights(self, logits: Any, maximum: Any) -> Any:
        return jnp.exp2(logits * jnp.float32(self.plan.to_log2) - per_row(maximum, logits.shape))

    def _no_total(self) -> Any:
        return wgmma_full((WG_ROWS, LANE_COLUMNS) if self.plan.lane_sums else (WG_ROWS,), 0.0)

    def _added(self, total: Any, weights: Any) -> Any:
        if self.plan.lane_sums:
            return add_columns(total, weights, interpret=bool(self.plan.interpret))
        return total + weights.sum(axis=1)


def add_columns(sums: Array, x: Array, *, interpret: bool) -> Array:
    """sums + x[:, :n] + x[:, n : 2 * n] + ..., added in this order, where `sums` has n columns."""

    def added(sums: Any, x: Any) -> Any:
        width = sums.shape[1]
        for column in range(0, x.shape[1], width):
            sums += x[:, column : column + width]
        return sums

    if interpret:
        return added(sums, x)
    wgmma = plgpu.Layout.WGMMA

    # One operation, because the layout solver takes time for every slice of x times every array of the same layout.
    @plgpu.inline_mgpu(
        arg_types=(wgmma, wgmma), return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=wgmma)
    )
    def add(_: Any, sums: Any, x: Any) -> Any:
        return added(sums, x)

    return add(sums, x)
