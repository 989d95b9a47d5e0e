"""The fused backward for Hopper: dQ, dK and dV in one kernel over the transposed lists, five products instead of seven.

A CTA holds a column of 128 keys and streams the queries that list them (`fused.compute`). A row of dQ is a sum
over CTAs. The copy engine adds the CTAs' summands in global memory in the order of arrival: in integers, whose sum is
the same in every order (`fixed_point`), or, where the call asks for no determinism, in float32.

Masks have columns that almost every row lists, such as a sink's. The longest columns of all heads are started first,
and several CTAs may share one of them; the CTAs' sums of dK and dV are then merged in a fixed order (`work.parts`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.fused.compute import FusedKeys
from xsake.kernels_pallas_gpu.hopper.fused.cta import FusedCta, FusedOperands, FusedResults
from xsake.kernels_pallas_gpu.hopper.fused.fixed_point import Units
from xsake.kernels_pallas_gpu.hopper.fused.memory import load
from xsake.kernels_pallas_gpu.hopper.fused.plan import COMPUTE_WGS, KEYS, REGISTERS, FusedConfig, FusedPlan
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.launch import pad, pad_bias, pad_to, run_kernel
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs, RowLists

Array = jax.Array


def backward(
    call: Call, lse: Array, delta: Array, d_out: Array, *, config: FusedConfig, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV) of a call for which `fused.plan.misfit` is None."""
    q, k, v, mask = call.query, call.key, call.value, call.mask
    plan = FusedPlan.of(call, config, interpret)
    rule, q_size = plan.rule, plan.q_size
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    indices = jnp.arange(q_size, dtype=jnp.int32)[None]
    per_query = dict(position=call.q_positions, segment=call.q_segments, index=indices)
    per_key = dict(position=call.kv_positions, segment=call.kv_segments)
    units = Units.of_dq(k, v, d_out, lse, delta) if plan.deterministic else None
    steps = units and units.steps()
    q, k, v, d_out = (pad_to(x, 8, 1) for x in (q, k, v, d_out))  # TMA copies tiles of 8 rows
    interleaved = plan.columns.interleaved(lists, plan.batch_size)
    sums = None if plan.simulate else jax.new_ref(jnp.zeros(q.shape, plan.dq_dtype))
    given = FusedOperands(
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        # Queries past the end are padded as empty rows, whose p is 0. The store drops keys past the end.
        statistic=pad(rule.row_statistic(lse), 2, q_size, -jnp.inf if rule.folds_lse else jnp.inf),
        minus_delta=pad(-delta, 2, q_size),
        steps=steps and steps._replace(rows=pad(steps.rows, 2, q_size).astype(plan.step_dtype)),
        q_vectors={name: pad(per_query[name], 1, q_size) for name in plan.q_vectors},
        kv_vectors={name: pad(per_key[name], 1, plan.kv_size) for name in plan.kv_vectors},
        lists=ListRefs(*lists),
        interleaved=interleaved,
        bias=None if call.bias is None else pad_bias(call.bias.swapaxes(2, 3), plan.kv_size, q_size),
        bits=Bits.of(mask.bitmaps, mask.q_bitmap),
        dq=sums,
    )

    found = run_kernel(
        lambda *refs: _share_the_work(FusedCta(plan, *refs)),
        "block_sparse_backward",
        plan.columns.ctas,
        COMPUTE_WGS,
        given,
        _results(plan, k, v),
        plan.shared(),
        interpret,
    )
    sums = (_dq_of_ctas(plan, found.dq_per_cta, interleaved) if sums is None else jax.freeze(sums))[:, : call.q_len]
    dq = (sums if units is None else units.value(sums, _summands(call, plan))) * jnp.float32(call.scale)
    dk, dv = (
        plan.columns.merged(whole, parts, lists, plan.columns_per_block)
        for whole, parts in ((found.dk, found.dk_parts), (found.dv, found.dv_parts))
    )
    return dq.astype(q.dtype), dk[:, : call.kv_len], dv[:, : call.kv_len]


def _results(plan: FusedPlan, k: Array, v: Array) -> FusedResults:
    per_cta = jax.ShapeDtypeStruct((plan.columns.ctas, plan.group, plan.q_size, plan.head_dim), plan.dq_dtype)
    return FusedResults(
        dk=jax.ShapeDtypeStruct(k.shape, k.dtype),
        dv=jax.ShapeDtypeStruct(v.shape, v.dtype),
        dk_parts=plan.columns.room_for_parts(KEYS, k.shape[-1]),
        dv_parts=plan.columns.room_for_parts(KEYS, v.shape[-1]),
        dq_per_cta=per_cta if plan.simulate else None,
    )


def _summands(call: Call, plan: FusedPlan) -> Array:
    """i32[B, T, H]: how many columns of keys add to the dQ of a query: the transposed lists name the same blocks."""
    row_ptr = call.mask.kv_row_ptr
    of_rows = (row_ptr[..., 1:] - row_ptr[..., :-1]) * plan.columns_per_block
    of_queries = jnp.repeat(of_rows, plan.block_q, axis=2)[..., : call.q_len]
    of_heads = jnp.repeat(of_queries, plan.num_q_heads // row_ptr.shape[1], axis=1)
    return jnp.broadcast_to(of_heads.swapaxes(1, 2), (plan.batch_size, call.q_len, plan.num_q_heads))


def _dq_of_ctas(plan: FusedPlan, sums: Array, interleaved: Array | None) -> Array:
    """dQ [B, T, H, D] of an interpreted kernel: the sum over CTAs."""
    ctas = jnp.arange(plan.columns.ctas, dtype=jnp.int32)
    pair, _, _ = jax.vmap(lambda cta: plan.columns.place(cta, interleaved))(ctas)
    per_pair = jnp.zeros((plan.pairs, *sums.shape[1:]), sums.dtype).at[pair].add(sums)
    return per_pair.reshape(plan.batch_size, plan.num_q_heads, *sums.shape[2:]).swapaxes(1, 2)


def _share_the_work(cta: FusedCta) -> None:
    @when(cta.wg < COMPUTE_WGS)
    def _compute() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        FusedKeys(cta).run()

    @when(cta.wg == COMPUTE_WGS)
    def _memory() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        load(cta)
