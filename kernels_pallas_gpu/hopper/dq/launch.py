"""The dQ kernel for Hopper: queries and dO stay, keys and values are streamed by the row lists (`work.streaming`)."""

from typing import Any

import jax
import jax.numpy as jnp

from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts
from xsake.kernels_pallas_gpu.hopper.dq.compute import Queries
from xsake.kernels_pallas_gpu.hopper.dq.cta import DqCta, DqOperands, DqResults
from xsake.kernels_pallas_gpu.hopper.dq.memory import load_item
from xsake.kernels_pallas_gpu.hopper.dq.plan import DqPlan
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.launch import pad, pad_bias, pad_to, run_kernel, vectors
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs, RowLists

Array = jax.Array


def dq(
    call: Call,
    lse: Array,
    minus_delta: Array | DeltaParts,
    d_out: Array,
    *,
    config: BackwardConfig,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dQ [B, T, H, D] and -delta [B, H, T].

    `DeltaParts` are for whole blocks that are not packed: the kernel then sums delta.
    """
    mask, bias = call.mask, call.bias
    lists = RowLists(mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.row_order)
    packing = Packing.required(mask.block_q, lists, call.q_heads, call.kv_heads, bias)
    parts = minus_delta if isinstance(minus_delta, DeltaParts) else None
    plan = DqPlan.of(call, packing, config, sums_delta=parts is not None, interpret=interpret)
    rule, q_size, kv_size = plan.rule, plan.q_size, plan.kv_size
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    positions = call.q_positions if plan.elements.by_position else None
    per_query = vectors(q_size, position=positions, segment=call.q_segments)
    indices = jnp.arange(kv_size, dtype=jnp.int32)[None]
    per_key = dict(position=call.kv_positions, segment=call.kv_segments, index=indices)
    given = DqOperands(
        q=q,
        k=k,
        v=v,
        d_out=d_out,
        statistic=packing.of_heads(pad(rule.row_statistic(lse), 2, q_size)),
        minus_delta=packing.of_heads(pad(minus_delta, 2, q_size)) if parts is None else parts,
        q_vectors={name: packing.of_tokens(x) for name, x in per_query.items()},
        kv_vectors={name: pad(per_key[name], 1, kv_size) for name in plan.kv_vectors},
        lists=ListRefs(*lists),
        bias=None if bias is None else pad_bias(bias, q_size, kv_size),
        bits=Bits.of(mask.bitmaps, mask.kv_bitmap),
        counter=plan.turns.counter(),
    )
    found = run_kernel(
        lambda *refs: DqCta(plan, *refs).share_the_work([Queries], load_item),
        "block_sparse_dq",
        plan.turns.ctas,
        plan.compute_wgs,
        given,
        DqResults(
            dq=jax.ShapeDtypeStruct(q.shape, q.dtype),
            minus_delta=None if parts is None else jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        ),
        plan.shared(),
        interpret,
    )
    return found.dq[:, : call.q_len], minus_delta if parts is None else found.minus_delta
