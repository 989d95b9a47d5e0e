"""The gradient of a bias, by XLA: a loop over the active tiles of all heads adds the gradient of each tile's logits.

A bias is rare in training, and its gradient is no sum over a row or column that a kernel could own. The loop makes no
array besides the gradient itself, and adds in the same order every time.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from xsake._ground.trace import vary, varying_axes
from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.tile.element import Rule, dot, lane_index, row_index, row_statistics
from xsake.kernels_pallas_tpu.tile.tiles import Axis, pitch_of, tile_of


def bias_gradient(
    call: Call, lse: Float[Array, "B H T"], delta: Float[Array, "B H T"], d_out: Float[Array, "B T H Dv"]
) -> Float[Array, "Bb Hb Tb Sb"]:
    mask, given = call.mask, call.bias
    assert given is not None
    q_pitch, kv_pitch = pitch_of(mask.block_q, call.q_len, 8), pitch_of(mask.block_kv, call.kv_len, 8)
    q = Axis(call.q_len, mask.block_q, q_pitch, tile_of(q_pitch, 512, 8))
    kv = Axis(call.kv_len, mask.block_kv, kv_pitch, tile_of(kv_pitch, 512, 8))
    rule = Rule.of(call, q, kv)
    f32 = lambda x: x.astype(jnp.float32)  # noqa: E731
    query, d_o = q.cut_heads(f32(call.query)), q.cut_heads(f32(d_out))
    key, value = kv.cut_heads(f32(call.key)), kv.cut_heads(f32(call.value))
    statistics = row_statistics(rule, lse, delta)
    q_tokens: Any = rule.q_tokens(call) if rule.q_rows else None
    kv_tokens: Any = rule.kv_tokens(call) if rule.kv_rows else None

    b_many, h_many, q_many, kv_many = (have > 1 for have in given.shape)
    bias = q.cut(given, 2) if q_many else given[:, :, None]
    bias = kv.cut(bias, 4) if kv_many else bias[..., None, :]  # [b, h, tiles, tile, tiles, tile]

    # The tiles of a row are those of the blocks in its list.
    rows = np.indices((call.batch, call.q_heads, q.tiles)).reshape(3, -1)
    mask_b, mask_h = rows[0] * mask.batch // call.batch, rows[1] * mask.heads // call.q_heads
    ptr = jnp.minimum(mask.kv_row_ptr, mask.capacity)
    first = ptr[mask_b, mask_h, rows[2] // q.split]
    ends = jnp.cumsum((ptr[mask_b, mask_h, rows[2] // q.split + 1] - first) * kv.split)
    place = jnp.asarray(np.stack([*rows, mask_b, mask_h], 1).astype(np.int32))

    def add(n: Array, total: Array) -> Array:
        row = jnp.searchsorted(ends, n, side="right", method="scan_unrolled").astype(jnp.int32)
        b, h, i, mb, mh = place[row]
        within = n - jnp.where(row > 0, ends[row - 1], 0)
        block = jnp.asarray(mask.kv_indices)[mb, mh, first[row] + within // kv.split]
        j = block * kv.split + within % kv.split
        live, j = j < kv.tiles, jnp.minimum(j, kv.tiles - 1)
        k = h // (call.q_heads // call.kv_heads)

        at = (b if b_many else 0, h if h_many else 0, i if q_many else 0, slice(None), j if kv_many else 0)
        x, slope = rule.logits(dot(query[b, h, i], key[b, k, j], (1, 1), True), f32(bias[at]))
        ok = rule.attends(
            rule.q_vectors(lambda axis, fill: row_index(axis, i, 1, fill), lambda r: q_tokens[b, i, r][:, None]),
            rule.kv_vectors(lambda axis, fill: lane_index(axis, [j], [live], fill), lambda r: kv_tokens[b, j, r][None]),
        )
        x, slope = rule.masked(x, slope, ok & live)
        p = rule.exp(x - statistics[b, h, i, 0][:, None])
        dx = p * (dot(d_o[b, h, i], value[b, k, j], (1, 1), True) - statistics[b, h, i, 1][:, None])
        if slope is not None:
            dx = dx * slope
        dx = dx if q_many else dx.sum(0, keepdims=True)
        return total.at[at].add(dx if kv_many else dx.sum(1, keepdims=True))

    start = vary(jnp.zeros(bias.shape, jnp.float32), varying_axes(call))
    total = lax.fori_loop(0, ends[-1], add, start)
    total = kv.uncut(total, 4) if kv_many else total[..., 0, :]
    total = q.uncut(total, 2) if q_many else total[:, :, 0]
    return total.astype(given.dtype)
