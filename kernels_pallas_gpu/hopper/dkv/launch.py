"""The dK/dV kernel for Hopper: keys and values stay, queries and dO are streamed by the transposed lists.

The query heads of a group are streamed one after the other, so that their sum needs no atomics. A compute warpgroup
holds 64 keys (`dkv.compute`), or two warpgroups share them (`dkv.split`). Long columns are cut by heads,
and the parts are added in a fixed order (`work.parts`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.dkv.compute import Column
from xsake.kernels_pallas_gpu.hopper.dkv.cta import DkvCta, DkvOperands, DkvResults
from xsake.kernels_pallas_gpu.hopper.dkv.memory import load_item
from xsake.kernels_pallas_gpu.hopper.dkv.plan import DkvPlan
from xsake.kernels_pallas_gpu.hopper.dkv.split import Keys, Values
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.launch import pad, pad_bias, pad_to, run_kernel, vectors
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs, RowLists
from xsake.kernels_pallas_gpu.lists.wide_columns import wide_columns

Array = jax.Array


def dkv(
    call: Call,
    lse: Array,
    minus_delta: Array,
    d_out: Array,
    *,
    config: BackwardConfig,
    float32_results: bool = False,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dK [B, S, K, D] and dV [B, S, K, Dv], in the keys' type or in float32."""
    mask, bias = call.mask, call.bias
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    packing = Packing.required(mask.block_q, lists, call.q_heads, call.kv_heads, bias)
    plan = DkvPlan.of(call, packing, config, interpret, float32_results)
    bits = Bits.of(mask.bitmaps, mask.q_bitmap)
    if plan.run is not None:
        lists, runs = wide_columns(mask, plan.block_kv)
        bits = Bits(runs)
    rule, columns, q_size, kv_size = plan.rule, plan.work.columns, plan.q_size, plan.kv_size
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    indices = jnp.arange(q_size, dtype=jnp.int32)[None]
    per_query = dict(position=call.q_positions, segment=call.q_segments, index=indices)
    given = DkvOperands(
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        # Queries past the end are padded as empty rows, whose p is 0. The store drops keys past the end.
        statistic=packing.of_heads(pad(rule.row_statistic(lse), 2, q_size, -jnp.inf if rule.folds_lse else jnp.inf)),
        minus_delta=packing.of_heads(pad(minus_delta, 2, q_size)),
        q_vectors={name: packing.of_tokens(pad(per_query[name], 1, q_size)) for name in plan.q_vectors},
        kv_vectors=vectors(
            kv_size, position=call.kv_positions if plan.elements.by_position else None, segment=call.kv_segments
        ),
        lists=ListRefs(*lists),
        interleaved=columns.interleaved(lists, plan.batch_size),
        bias=None if bias is None else pad_bias(bias.swapaxes(2, 3), kv_size, q_size),
        bits=bits,
        counter=plan.turns.counter(),
    )

    found = run_kernel(
        lambda *refs: DkvCta(plan, *refs).share_the_work([Values, Keys] if plan.split else [Column], load_item),
        "block_sparse_dkv",
        plan.turns.ctas,
        plan.compute_wgs,
        given,
        DkvResults(
            dk=plan.result_like(k),
            dv=plan.result_like(v),
            dk_parts=columns.room_for_parts(plan.work.unit, plan.head_dim),
            dv_parts=columns.room_for_parts(plan.work.unit, plan.v_head_dim),
        ),
        plan.shared(),
        interpret,
    )
    dk, dv = (
        columns.merged(whole, parts, lists, plan.work.units_per_block)
        for whole, parts in ((found.dk, found.dk_parts), (found.dv, found.dv_parts))
    )
    return dk[:, : call.kv_len], dv[:, : call.kv_len]
