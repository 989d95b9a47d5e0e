"""Block-sparse attention in plain XLA, driven by the mask's lists.

The active tiles of all batches and heads form one flat work list. A loop takes `chunk` of them at a time, as one
batched matrix product, and adds each tile's share to the row it belongs to: time and memory follow the active blocks,
whatever the heads' densities, and no [T, S] array exists. Arithmetic is float32 (or float64) at highest precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from xsake._ground.buckets import power_of_two_at_least
from xsake._ground.fields import check_fields, whole
from xsake._ground.trace import vary, varying_axes
from xsake._rewrites import rewrite
from xsake._rewrites.few_queries import FewQueries, RowParts
from xsake._rewrites.packed_heads import PackedHeads
from xsake._rewrites.reach import Reach
from xsake.backend.contract import Call
from xsake.kernels_xla_ref.paged import PagedTiles

NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one direction is tiled.

    Args:
      q, kv: rows and columns of a tile; they must divide the mask's block.
      chunk: tiles per step of the loop.
    """

    q: int = whole(1, 2**16)
    kv: int = whole(1, 2**16)
    chunk: int = whole(1, 2**16)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward and the backward."""

    forward: Tiling
    backward: Tiling

    def __post_init__(self) -> None:
        check_fields(self)


def default_config(call: Call) -> Config:
    return Config(forward=_forward_tiling(call, 16), backward=_default_tiling(_gradient_shapes(call), 4))


def search_space(call: Call) -> Sequence[Config]:
    """How many tiles a step takes. Smaller tiles than the heuristic's gained nothing on the one CPU tried."""
    default, counts = default_config(call), (1, 2, 4, 8, 16, 32, 64)
    forward = [dataclasses.replace(default, forward=_forward_tiling(call, n)) for n in counts]
    backward = [dataclasses.replace(default, backward=_default_tiling(_gradient_shapes(call), n)) for n in counts]
    return list(dict.fromkeys([default, *forward, *backward]))


def misfit(call: Call, config: Config) -> str | None:
    given = (("forward", config.forward, _forward_shapes(call)), ("backward", config.backward, _gradient_shapes(call)))
    for name, tiling, run in given:
        mask = run.mask
        if mask.block_q % tiling.q or mask.block_kv % tiling.kv:
            return f"{name}: tile {tiling.q} x {tiling.kv} does not divide block {mask.block_q} x {mask.block_kv}"
    if call.page is not None and call.page % config.forward.kv:
        return f"forward: a tile of {config.forward.kv} keys does not divide the page of {call.page} keys"
    return None


def _default_tiling(call: Call, tiles: int) -> Tiling:
    """Tiles of about 128 x 128, and so many a step that the cores are busy and their caches suffice (measured)."""
    q, kv = _tile(call.mask.block_q, call.q_len), _tile(math.gcd(call.mask.block_kv, call.page or 0), call.kv_len)
    return Tiling(q=q, kv=kv, chunk=max(1, min(tiles * 128 * 128 // (q * kv), 256)))


def _forward_tiling(call: Call, tiles: int) -> Tiling:
    run = _forward_shapes(call)
    tiling = _default_tiling(run, tiles)
    if RowParts.of(call, workers=1, least_rows=1) is None:
        return tiling
    blocks = run.batch * run.q_heads * run.mask.capacity  # a step takes no more tiles than there are
    return dataclasses.replace(tiling, chunk=min(tiling.chunk, blocks * (run.mask.block_kv // tiling.kv)))


FORWARD_REWRITES = (Reach.of, partial(FewQueries.of, workers=1, least_rows=1), PackedHeads.of)
GRADIENT_REWRITES = (PackedHeads.of,)


def _forward_shapes(call: Call) -> Call:
    return rewrite.shapes(FORWARD_REWRITES, call)


def _gradient_shapes(call: Call) -> Call:
    return rewrite.shapes(GRADIENT_REWRITES, call)


def _tile(block: int, length: int) -> int:
    """The largest divisor of the block that is at most 128 and not needlessly longer than the sequence."""
    limit = min(128, power_of_two_at_least(length))
    return max(d for d in range(1, min(block, limit) + 1) if block % d == 0)


class _Work(NamedTuple):
    """Tiles to do, by flat tile number; only the first `total` count.

    Numbers are unsigned: quotients, remainders and indices of signed numbers, which may be negative, are several
    operations each, and a compiler's time follows their number.
    """

    q_tile: UInt[Array, " W"]
    kv_tile: UInt[Array, " W"]
    total: Int[Array, ""]
    bitmap: UInt[Array, " W"] | None  # its number among the bitmaps of all batches and heads


class _Tiles:
    """The call cut into tiles: arrays as [number of tiles, rows, ...], and what belongs to the chosen tiles."""

    def __init__(self, call: Call, tiling: Tiling):
        mask = call.mask
        if mask.block_q % tiling.q or mask.block_kv % tiling.kv:
            raise ValueError(
                f"tile {tiling.q} x {tiling.kv} must divide the mask's block {mask.block_q} x {mask.block_kv}"
            )
        self.call, self.tq, self.tkv, self.chunk = call, tiling.q, tiling.kv, tiling.chunk
        self.split_q, self.split_kv = mask.block_q // tiling.q, mask.block_kv // tiling.kv
        self.num_q, self.num_kv = mask.num_q_blocks * self.split_q, mask.num_kv_blocks * self.split_kv
        self.dtype = np.promote_types(call.query.dtype, jnp.float32)
        self.group = call.q_heads // call.kv_heads

    # A head array [B, L, H, D] <-> tiles [B * H * n, t, D]; a token array [B, L] -> tiles [B * n, t].

    def q_tiles(self, x: Float[Array, "B T H X"]) -> Float[Array, "N tq X"]:
        return self._cut(x, self.num_q, self.tq)

    def kv_tiles(self, x: Float[Array, "B S K X"]) -> Float[Array, "N tkv X"]:
        return self._cut(x, self.num_kv, self.tkv)

    def _cut(self, x: Array, num: int, tile: int) -> Array:
        b, length, heads, dim = x.shape
        x = jnp.pad(x.astype(self.dtype).swapaxes(1, 2), ((0, 0), (0, 0), (0, num * tile - length), (0, 0)))
        return x.reshape(b * heads * num, tile, dim)

    def uncut(self, tiles: Float[Array, "N t X"], heads: int, length: int) -> Float[Array, "B L h X"]:
        tiles = tiles.reshape(self.call.batch, heads, -1, tiles.shape[-1])[:, :, :length]
        return tiles.swapaxes(1, 2)

    def row_tiles(self, x: Float[Array, "B H T"], fill: float) -> Float[Array, "N tq"]:
        padded = jnp.pad(
            x.astype(self.dtype), ((0, 0), (0, 0), (0, self.num_q * self.tq - x.shape[2])), constant_values=fill
        )
        return padded.reshape(-1, self.tq)

    def work(self) -> _Work:
        """The mask's lists as one list of tiles: by batch, head, row of tiles, then the row's entries in order."""
        call, mask = self.call, self.call.mask
        heads = np.arange(call.q_heads) * mask.heads // call.q_heads
        shared = mask.batch == 1
        ptr = jnp.minimum(mask.kv_row_ptr, mask.capacity)[:, heads]
        ptr = jnp.broadcast_to(ptr, (call.batch, *ptr.shape[1:])).astype(jnp.uint32)
        first_row = np.arange(mask.num_q_blocks) * self.split_q
        rows_here = np.clip(
            -(-call.q_len // self.tq) - first_row, 0, self.split_q
        )  # tiles of padding only have no work
        per_row = (ptr[..., 1:] - ptr[..., :-1]) * self.split_kv
        amount = (per_row * rows_here[None, None].astype(np.uint32)).reshape(-1)
        ends = jnp.cumsum(amount)

        size = call.batch * call.q_heads * mask.capacity * self.split_q * self.split_kv
        size = -(-size // self.chunk) * self.chunk
        item = jnp.arange(size, dtype=jnp.uint32)
        # As jnp.repeat, in half its operations: how many rows have ended before the item.
        ended = jnp.zeros(size, jnp.uint32).at[ends[:-1]].add(1, mode="drop")
        row = jnp.cumsum(ended)
        within = item - (ends - amount)[row]
        entries = jnp.maximum(per_row.reshape(-1)[row], 1)
        sub_row, entry = within // entries, within % entries
        head, block_row = row // mask.num_q_blocks, row % mask.num_q_blocks
        b, h = head // call.q_heads, head % call.q_heads
        slot = ptr[..., :-1].reshape(-1)[row] + entry // self.split_kv
        slot = jnp.minimum(slot, mask.capacity - 1)
        # Lists of a mask that was made while tracing are NumPy arrays, which traced numbers cannot index.
        mask_batch, mask_head = jnp.zeros_like(b) if shared else b, jnp.asarray(heads.astype(np.uint32))[h]
        block = jnp.asarray(mask.kv_indices)[mask_batch, mask_head, slot].astype(jnp.uint32)
        q_tile = head * self.num_q + block_row * self.split_q + jnp.minimum(sub_row, self.split_q - 1)
        kv_head = b * call.kv_heads + h // self.group
        kv_tile = kv_head * self.num_kv + block * self.split_kv + entry % self.split_kv
        bitmap = None
        if mask.bitmaps is not None:
            table_batch, table_heads, count = mask.bitmaps.shape[:3]
            owner = (mask_batch if table_batch > 1 else 0) * table_heads + (mask_head if table_heads > 1 else 0)
            bitmap = owner * count + jnp.asarray(mask.kv_bitmap)[mask_batch, mask_head, slot].astype(jnp.uint32)
        return _Work(q_tile, kv_tile, ends[-1].astype(jnp.int32), bitmap)

    def take(self, work: _Work, step: Array) -> _Chosen:
        start = step * self.chunk
        q_tile = lax.dynamic_slice_in_dim(work.q_tile, start, self.chunk)
        kv_tile = lax.dynamic_slice_in_dim(work.kv_tile, start, self.chunk)
        live = start + jnp.arange(self.chunk) < work.total
        head, i = q_tile // self.num_q, q_tile % self.num_q
        b, h, j = head // self.call.q_heads, head % self.call.q_heads, kv_tile % self.num_kv
        bitmap = None if work.bitmap is None else lax.dynamic_slice_in_dim(work.bitmap, start, self.chunk)
        return _Chosen(q_tile, kv_tile, b, h, i, j, live, bitmap)

    def attends(self) -> Callable[[_Chosen], Array | None]:
        """The element rule on chosen tiles: bool[chunk, tq, tkv], or None where every element passes."""
        call, tokens = self.call, _TokenTiles(self)
        padded = self.num_kv * self.tkv != call.kv_len
        bits = None if call.mask.bitmaps is None else _Bits(self)
        free = call.band == (None, None) and call.q_segments is None and bits is None
        if not padded and free:
            return lambda chosen: None
        # Rows past the last query have no weight, but a bias of NaN for keys that they alone attend would reach dK.
        padded_bias = call.bias is not None and call.bias.shape[2] == 1 and self.num_q * self.tq != call.q_len

        def test(chosen: _Chosen) -> Array:
            ok = jnp.ones((self.chunk, self.tq, self.tkv), bool)
            if padded:
                ok &= (tokens.kv_index(chosen) < call.kv_len)[:, None, :]
            ok &= call.band.allows_position(tokens.q_position(chosen)[:, :, None], tokens.kv_position(chosen)[:, None])
            if call.q_segments is not None:
                ok &= tokens.same_segment(chosen)
            if bits is not None:
                ok &= bits.of(chosen)
            if padded_bias:
                ok &= (tokens.q_index(chosen) < call.q_len)[:, :, None]
            return ok

        return test


class _Chosen(NamedTuple):
    """The tiles of one step: flat numbers, and batch, head, row of tiles and column of tiles of each."""

    q_tile: Array
    kv_tile: Array
    batch: Array
    head: Array
    i: Array
    j: Array
    live: Array
    bitmap: Array | None


class _TokenTiles:
    """Indices, positions and segment ids of the tokens of chosen tiles."""

    def __init__(self, tiles: _Tiles):
        self._t = tiles
        call = tiles.call

        def cut(x: Array | None, num: int, tile: int) -> Array | None:
            if x is None:
                return None
            return jnp.pad(x, ((0, 0), (0, num * tile - x.shape[1]))).reshape(-1, tile)

        self._q_positions = cut(call.q_positions, tiles.num_q, tiles.tq)
        self._kv_positions = cut(call.kv_positions, tiles.num_kv, tiles.tkv)
        self._q_segments = cut(call.q_segments, tiles.num_q, tiles.tq)
        self._kv_segments = cut(call.kv_segments, tiles.num_kv, tiles.tkv)

    def q_index(self, c: _Chosen) -> Array:
        return c.i.astype(jnp.int32)[:, None] * self._t.tq + jnp.arange(self._t.tq, dtype=jnp.int32)[None]

    def kv_index(self, c: _Chosen) -> Array:
        return c.j.astype(jnp.int32)[:, None] * self._t.tkv + jnp.arange(self._t.tkv, dtype=jnp.int32)[None]

    def q_position(self, c: _Chosen) -> Array:
        return self.q_index(c) if self._q_positions is None else self._q_positions[c.batch * self._t.num_q + c.i]

    def kv_position(self, c: _Chosen) -> Array:
        return self.kv_index(c) if self._kv_positions is None else self._kv_positions[c.batch * self._t.num_kv + c.j]

    def same_segment(self, c: _Chosen) -> Array:
        assert self._q_segments is not None and self._kv_segments is not None
        q, kv = self._q_segments[c.batch * self._t.num_q + c.i], self._kv_segments[c.batch * self._t.num_kv + c.j]
        return q[:, :, None] == kv[:, None, :]


class _Bits:
    """The bits of chosen tiles."""

    def __init__(self, tiles: _Tiles):
        bitmaps = jnp.asarray(tiles.call.mask.bitmaps)
        self._t, self._columns = tiles, bitmaps.shape[3]
        split = tiles.split_kv if self._columns > 1 else 1
        self._split, self._words = split, bitmaps.reshape(-1, self._columns // split, bitmaps.shape[4])

    def of(self, c: _Chosen) -> Array:
        """bool[chunk, tq, tkv or 1]."""
        assert c.bitmap is not None
        row = (c.i % self._t.split_q)[:, None] * self._t.tq + jnp.arange(self._t.tq, dtype=jnp.uint32)[None]
        words = self._words[c.bitmap * self._split + c.j % self._split]  # [chunk, columns of a tile, words]
        own = jnp.take_along_axis(words, (row // 32)[:, None, :], axis=-1)
        return ((own >> (row % 32)[:, None, :]) & 1).astype(bool).swapaxes(1, 2)


class _BiasTiles:
    """The bias cut into tiles [N, tq or 1, tkv or 1]; a broadcast dimension has one tile of size 1."""

    def __init__(self, tiles: _Tiles, bias: Float[Array, "Bb Hb Tb Sb"]):
        self.shape = b, h, t, s = bias.shape
        self._batch, self._heads = b != 1, h != 1
        self.num_q, self.tq = (tiles.num_q, tiles.tq) if t > 1 else (1, 1)
        self.num_kv, self.tkv = (tiles.num_kv, tiles.tkv) if s > 1 else (1, 1)
        x = jnp.pad(
            bias.astype(tiles.dtype), ((0, 0), (0, 0), (0, self.num_q * self.tq - t), (0, self.num_kv * self.tkv - s))
        )
        x = x.reshape(b, h, self.num_q, self.tq, self.num_kv, self.tkv)
        self.tiles = x.swapaxes(3, 4).reshape(-1, self.tq, self.tkv)

    def number(self, c: _Chosen) -> Array:
        n = c.batch if self._batch else jnp.zeros_like(c.batch)
        n = n * self.shape[1] + (c.head if self._heads else 0)
        n = n * self.num_q + (c.i if self.num_q > 1 else 0)
        return n * self.num_kv + (c.j if self.num_kv > 1 else 0)

    def reduce(self, d_logits: Float[Array, "C tq tkv"]) -> Array:
        if self.tq == 1:
            d_logits = d_logits.sum(1, keepdims=True)
        return d_logits.sum(2, keepdims=True) if self.tkv == 1 else d_logits

    def uncut(self, tiles: Array) -> Array:
        b, h, t, s = self.shape
        x = tiles.reshape(b, h, self.num_q, self.num_kv, self.tq, self.tkv).swapaxes(3, 4)
        return x.reshape(b, h, self.num_q * self.tq, self.num_kv * self.tkv)[:, :, :t, :s]


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def _add_tiles(live: Array, *sums: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """total[number[c]] += tiles[c] for the live c, one by one: the same bits always, and a NaN stays in its tile.

    Of several sums (total, number, tiles) in one loop: each loop costs a compiler as much as the rest of a step.
    """
    totals, numbers, tiles = zip(*sums, strict=True)

    def add(c: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        each = zip(totals, numbers, tiles, strict=True)
        return tuple(_put(sums, n[c], sums[n[c]] + jnp.where(live[c], tile[c], 0)) for sums, n, tile in each)

    return lax.fori_loop(np.uint32(0), np.uint32(live.shape[0]), add, totals)


def _put(rows: Array, number: Array, row: Array) -> Array:
    """`rows` with one row changed, whose number is in range: `at` would test that."""
    return lax.dynamic_update_index_in_dim(rows, row, number, 0)


def _logits(
    tiles: _Tiles, bias: _BiasTiles | None, test: Callable, q: Array, k: Any, c: _Chosen
) -> tuple[Array, Array | None]:
    """Logits of chosen tiles, -inf where an element does not attend, and the soft cap's derivative, 0 there."""
    call = tiles.call
    x = _dot("cqd,ckd->cqk", q[c.q_tile], k[c.kv_tile])
    if bias is not None:
        x = x + bias.tiles[bias.number(c)]
    slope = None
    if call.soft_cap is not None:
        t = jnp.tanh(x / call.soft_cap)
        x, slope = call.soft_cap * t, 1 - t * t
    ok = test(c)
    if ok is None:
        return x, slope
    return jnp.where(ok, x, NEG_INF), None if slope is None else jnp.where(ok, slope, 0.0)


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    return rewrite.forward(FORWARD_REWRITES, call, lambda call: _forward(call, config))


def _forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    tiles = _Tiles(call, config.forward)
    q = tiles.q_tiles(call.query) * call.scale
    k, v = (
        tiles.kv_tiles(x) if call.page is None else PagedTiles(call, tiles.tkv, x, value)
        for x, value in ((call.key, False), (call.value, True))
    )
    bias = None if call.bias is None else _BiasTiles(tiles, call.bias)
    test, work = tiles.attends(), tiles.work()

    def step(n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, denominator, acc = state
        c = tiles.take(work, n)
        x, _ = _logits(tiles, bias, test, q, k, c)
        before = peak[c.q_tile]
        peak = peak.at[jnp.where(c.live, c.q_tile, peak.shape[0])].max(x.max(-1), mode="drop")
        now = peak[c.q_tile]
        safe = jnp.where(now == NEG_INF, 0.0, now)
        p = jnp.exp(x - safe[..., None])
        # Work is in row order, so only the first tile's row can have a share already.
        row, decay = c.q_tile[0], jnp.exp(before[0] - safe[0])
        denominator = _put(denominator, row, denominator[row] * decay)
        acc = _put(acc, row, acc[row] * decay[:, None])
        values = _dot("cqk,ckd->cqd", p, v[c.kv_tile])
        denominator, acc = _add_tiles(c.live, (denominator, c.q_tile, p.sum(-1)), (acc, c.q_tile, values))
        return peak, denominator, acc

    rows = q.shape[:2]
    start = (
        jnp.full(rows, NEG_INF, tiles.dtype),
        jnp.zeros(rows, tiles.dtype),
        jnp.zeros((*rows, call.value_dim), tiles.dtype),
    )
    steps = -(-work.total // tiles.chunk)
    peak, denominator, acc = lax.fori_loop(0, steps, step, vary(start, varying_axes(call)))

    if call.sink_lse is not None:
        sink = jnp.broadcast_to(call.sink_lse[:, :, None], (call.batch, call.q_heads, tiles.num_q))
        sink = sink.reshape(-1, 1).astype(tiles.dtype)
        top = jnp.maximum(peak, sink)
        safe = jnp.where(top == NEG_INF, 0.0, top)
        decay = jnp.exp(peak - safe)
        denominator = denominator * decay + jnp.exp(sink - safe)
        acc, peak = acc * decay[..., None], top
    empty = denominator == 0
    out = acc / jnp.where(empty, 1.0, denominator)[..., None]
    lse = jnp.where(empty, NEG_INF, peak + jnp.log(jnp.where(empty, 1.0, denominator)))
    lse = tiles.uncut(lse[..., None], call.q_heads, call.q_len)[..., 0].swapaxes(1, 2)
    return tiles.uncut(out, call.q_heads, call.q_len).astype(call.query.dtype), lse


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, Array | None]:
    run = partial(_backward, config=config, with_bias=with_bias)
    return rewrite.backward(GRADIENT_REWRITES, call, (lse, delta, d_out), run)


def _backward(
    call: Call, lse: Array, delta: Array, d_out: Array, *, config: Config, with_bias: bool
) -> tuple[Array, Array, Array, Array | None]:
    """One pass over the same work list: five products a tile, its shares added to rows and columns in a fixed order."""
    tiles = _Tiles(call, config.backward)
    q, k, v = tiles.q_tiles(call.query) * call.scale, tiles.kv_tiles(call.key), tiles.kv_tiles(call.value)
    d_o, row_delta = tiles.q_tiles(d_out), tiles.row_tiles(delta, 0.0)
    # Rows that attend nothing or do not exist weigh exp(-inf) = 0, however large their logits are.
    row_lse = tiles.row_tiles(jnp.where(lse == NEG_INF, math.inf, lse), math.inf)
    bias = None if call.bias is None else _BiasTiles(tiles, call.bias)
    test, work = tiles.attends(), tiles.work()

    def step(n: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
        dq, dk, dv, *d_bias = grads
        c = tiles.take(work, n)
        x, slope = _logits(tiles, bias, test, q, k, c)
        p = jnp.exp(x - row_lse[c.q_tile][..., None])
        do = d_o[c.q_tile]
        dx = p * (_dot("cqd,ckd->cqk", do, v[c.kv_tile]) - row_delta[c.q_tile][..., None])
        if slope is not None:
            dx = dx * slope
        sums = [
            (dq, c.q_tile, _dot("cqk,ckd->cqd", dx, k[c.kv_tile])),
            (dk, c.kv_tile, _dot("cqk,cqd->ckd", dx, q[c.q_tile])),
            (dv, c.kv_tile, _dot("cqk,cqd->ckd", p, do)),
        ]
        if bias is not None and with_bias:
            sums.append((d_bias[0], bias.number(c), bias.reduce(dx)))
        return _add_tiles(c.live, *sums)

    like = (q, k, v, bias.tiles) if bias is not None and with_bias else (q, k, v)
    start = vary(tuple(jnp.zeros(x.shape, x.dtype) for x in like), varying_axes(call))
    steps = -(-work.total // tiles.chunk)
    dq, dk, dv, *d_bias = lax.fori_loop(0, steps, step, start)
    if bias is not None and call.bias is not None and with_bias:
        d_bias = [bias.uncut(d_bias[0]).astype(call.bias.dtype)]
    dtype = call.query.dtype
    return (
        (tiles.uncut(dq, call.q_heads, call.q_len) * call.scale).astype(dtype),
        tiles.uncut(dk, call.kv_heads, call.kv_len).astype(dtype),
        tiles.uncut(dv, call.kv_heads, call.kv_len).astype(dtype),
        d_bias[0] if with_bias else None,
    )
