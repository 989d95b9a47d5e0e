"""dK and dV for Hopper where every query has chosen its own blocks of keys: only the queries that chose them are read.

The transposed lists name blocks of a few queries, with a bit per query. A CTA holds 64 keys. Its memory warpgroup walks
the list of their block and copies every query whose bit is set, with all heads of its group, to the next free rows of a
tile of 64 rows. Two compute warpgroups take the tiles in turn; what they found is added up at the end, always in the
same order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.gathered.compute import GatheredKeys
from xsake.kernels_pallas_gpu.hopper.gathered.cta import GatheredCta, GatheredOperands, GatheredResults
from xsake.kernels_pallas_gpu.hopper.gathered.memory import gather
from xsake.kernels_pallas_gpu.hopper.gathered.plan import WGS, GatheredPlan, unknown
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.launch import pad, pad_to, run_kernel
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs, RowLists

Array = jax.Array


def dkv(
    call: Call,
    lse: Array,
    minus_delta: Array,
    d_out: Array,
    *,
    config: BackwardConfig,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dK [B, S, K, D] and dV [B, S, K, Dv]."""
    mask, plan = call.mask, GatheredPlan.of(call, config, interpret)
    packing, columns = plan.packing, plan.columns
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    bits = Bits.of(mask.bitmaps, mask.q_bitmap)
    assert bits is not None and bits.words is None, unknown(call, plan.head_dim, plan.v_head_dim)
    words = bits.number & jnp.int32(-1 if plan.block_q == 32 else (1 << plan.block_q) - 1)
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    q_size = plan.nobody + packing.whole
    given = GatheredOperands(
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        statistic=packing.of_heads(pad(plan.rule.row_statistic(lse), 2, q_size, -jnp.inf)),
        minus_delta=packing.of_heads(pad(minus_delta, 2, q_size)),
        lists=ListRefs(*lists),
        words=words,
        chosen=_chosen(words),
    )
    found = run_kernel(
        lambda *refs: _share_the_work(GatheredCta(plan, *refs)),
        "gathered_dkv",
        columns.ctas,
        WGS,
        given,
        GatheredResults(
            dk=jax.ShapeDtypeStruct(k.shape, k.dtype),
            dv=jax.ShapeDtypeStruct(v.shape, v.dtype),
            dk_parts=columns.room_for_parts(ROWS, plan.head_dim),
            dv_parts=columns.room_for_parts(ROWS, plan.v_head_dim),
        ),
        [plan.memory(), plan.barriers()],
        interpret,
    )
    dk, dv = (
        columns.merged(whole, parts, lists, plan.columns_per_block)
        for whole, parts in ((found.dk, found.dk_parts), (found.dv, found.dv_parts))
    )
    return dk[:, : call.kv_len], dv[:, : call.kv_len]


def _chosen(words: Array) -> Array:
    """i32[b, h, N + 1]: how many queries chose a block of keys in all slots of the lists before each."""
    return jnp.pad(jnp.cumsum(lax.population_count(words), axis=-1), [(0, 0), (0, 0), (1, 0)])


def _share_the_work(cta: GatheredCta) -> None:
    @when(cta.wg < WGS)
    def _compute() -> None:
        plgpu.set_max_registers(cta.plan.config.compute_registers, action="increase")
        GatheredKeys(cta).run()

    @when(cta.wg == WGS)
    def _memory() -> None:
        plgpu.set_max_registers(cta.plan.config.memory_registers, action="decrease")
        gather(cta)
