"""The forward kernel for Hopper: (out, lse) from compressed block lists.

A CTA has three warpgroups. Two compute 64 query rows each (`forward.compute`); one reads the block lists and
loads K and V (`forward.memory`). The CTA walks its share of query tiles, the longest first, and loads the next
tile while it finishes the current one.

The two compute warpgroups share K and V (`Pairing`): they take neighbouring rows of one mask row, two query heads of
one group that share a block list, or two neighbouring mask rows whose lists are merged. Otherwise each has its own
list, ring and memory warpgroup.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.forward import pages
from xsake.kernels_pallas_gpu.hopper.forward.compute import ComputeWarpgroup
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig, Pairing
from xsake.kernels_pallas_gpu.hopper.forward.cta import ForwardCta
from xsake.kernels_pallas_gpu.hopper.forward.memory import MemoryWarpgroup
from xsake.kernels_pallas_gpu.hopper.forward.plan import ForwardPlan
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.launch import name_module, pad_bias, pad_to
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import RowLists
from xsake.kernels_pallas_gpu.lists.merge import merged_rows
from xsake.kernels_pallas_gpu.lists.row_pairs import row_pairs
from xsake.kernels_pallas_gpu.lists.work_order import room_for_parts, work_order


def forward(
    call: Call, *, pairing: Pairing, config: ForwardConfig, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, Dv] in q's dtype and lse f32[B, H, T] (natural log, sinks included)."""
    q, k, v, mask, page_table, sink_lse = call.query, call.key, call.value, call.mask, call.page_table, call.sink_lse
    lists = RowLists(mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.row_order)
    bits, bias, block_q, block_kv = Bits.of(mask.bitmaps, mask.kv_bitmap), call.bias, mask.block_q, mask.block_kv
    q_segments, kv_segments = call.q_segments, call.kv_segments
    q_positions, kv_positions = call.q_positions, call.kv_positions
    packing = Packing.required(block_q, lists, call.q_heads, call.kv_heads, bias)
    plan = ForwardPlan.of(call, packing, config, pairing=pairing, interpret=interpret)
    batch_size, q_len, kv_len, heads, v_head_dim = call.batch, call.q_len, plan.kv_len, plan.num_q_heads, v.shape[3]
    page, pairing = plan.page, plan.pairing
    # TMA copies tiles of 8 rows: a length must be a multiple of 8, or less than 8.
    if page is None:
        k, v = (x if x.shape[1] < 8 else pad_to(x, 8, 1) for x in (k, v))
    else:
        k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (k, v))
    q = q if q_len < 8 and packing.group == 1 else pad_to(q, packing.whole, 1)

    # Optional operands, padded so that every read of a tile is inside the array and every row is legal for TMA.
    options: dict[str, jax.Array] = {}
    if q_segments is not None:
        options["q_segments"] = packing.of_tokens(pad_to(q_segments, block_q, 1))
        options["kv_segments"] = pad_to(kv_segments, plan.tile_kv, 1)
    if "q_positions" in plan.q_vectors:
        if q_positions is None:
            q_positions = jnp.broadcast_to(jnp.arange(q_len, dtype=jnp.int32), (batch_size, q_len))
        if kv_positions is None:
            kv_positions = jnp.broadcast_to(jnp.arange(kv_len, dtype=jnp.int32), (batch_size, kv_len))
        options["q_positions"] = packing.of_tokens(pad_to(q_positions, block_q, 1))
        options["kv_positions"] = pad_to(kv_positions, plan.tile_kv, 1)
    if bias is not None:
        sizes = (pl.cdiv(n, block) * block for n, block in ((q_len, block_q), (kv_len, block_kv)))
        options["bias"] = pad_bias(bias, *sizes)
    if bits is not None:
        options |= {name: x for name, x in bits._asdict().items() if x is not None}
    if sink_lse is not None:
        sink_lse = sink_lse.astype(jnp.float32)[..., None]
        of_rows = jnp.broadcast_to(sink_lse, (*sink_lse.shape[:2], block_q if packing.group > 1 else 1))
        options["sink_lse"] = packing.of_heads(of_rows)

    if page is not None:
        options["places"] = pages.places(
            page_table,
            kv_segments,
            num_pages=len(call.value),
            page=page,
            unit=plan.unit,
            num_runs=pl.cdiv(kv_len, block_kv) * plan.units_per_block,
        )

    if plan.by_length:
        order = work_order(lists.row_ptr, section=plan.head_group, workers=plan.num_workers, cut=plan.cuts_rows)
        options |= order._asdict()

    if pairing is Pairing.UNION:
        pairs = row_pairs(*lists[:3])
        lists = RowLists(pairs.indices, pairs.begins, pairs.num_both, pairs.order)
        options |= dict(num_entries=pairs.num_entries, by_turns=pairs.by_turns)

    list_operands = [x for x in lists if x is not None]
    counter = [jax.new_ref(jnp.zeros((1,), jnp.int32))] if plan.dynamic else []

    def entry(*refs: Any) -> None:
        if not interpret:
            name_module("block_sparse_forward")
        pl.run_scoped(
            lambda memory, barriers: _share_the_work(
                ForwardCta(plan, refs, len(list_operands), tuple(options), memory, barriers)
            ),
            plan.memory(),
            plan.barriers(),
            collective_axes="wg",
        )

    shapes = [
        jax.ShapeDtypeStruct((*q.shape[:3], v_head_dim), q.dtype),
        jax.ShapeDtypeStruct((batch_size, heads, plan.num_rows * plan.row_size), jnp.float32),
    ]
    if plan.cuts_rows:
        room = room_for_parts(plan.num_workers)
        shapes.append(jax.ShapeDtypeStruct((room, plan.block_q, v_head_dim), q.dtype))
        shapes.append(jax.ShapeDtypeStruct((room, plan.block_q), jnp.float32))

    out, lse, *parts = plgpu.kernel(
        entry,
        out_type=tuple(shapes),
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=plan.compute_wgs + plan.workers_per_cta,
        thread_name="wg",
        # Row reductions stay inside a warp, so that no scratch for reductions across warps is needed. Nor are automatic
        # barriers: where a warpgroup both writes and reads a note by ordinary accesses (a ticket), there is a barrier.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret or None,
    )(q, k, v, *list_operands, *options.values(), *counter)
    if plan.cuts_rows:
        out, lse = merged_rows(order, out, lse, *parts)
    return out[:, :q_len], packing.to_heads(lse)[:, :, :q_len]


def _share_the_work(cta: ForwardCta) -> None:
    plan = cta.plan

    @when(cta.wg < plan.compute_wgs)
    def _compute() -> None:
        if plan.pairing is not Pairing.ALONE:
            plgpu.set_max_registers(plan.registers[0], action="increase")
        ComputeWarpgroup(cta).run()

    @when(cta.wg >= plan.compute_wgs)
    def _memory() -> None:
        if plan.pairing is not Pairing.ALONE:
            plgpu.set_max_registers(plan.registers[1], action="decrease")
        MemoryWarpgroup(cta).run()
