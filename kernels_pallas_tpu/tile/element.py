"""The element rule and the logits inside a kernel, for either orientation of a tile.

    an element attends iff  lower(q) <= kv <= upper(q)  and the segments are equal

kv is the key's position; a query's bounds follow from its position and the band. Padding has a kv above every bound, or
an upper bound below every kv, so that neither the end of a sequence nor a repeated tile needs a test of its own.

A tile has one axis on the sublanes (vectors [n, 1], "rows") and one on the lanes (vectors [1, n], "lanes").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from xsake.backend.contract import Call
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_tpu.tile.tiles import LANES, Axis

NEVER = 2**31 - 1  # position of a key that no query reaches
NOTHING = -(2**31)  # upper bound of a query that reaches no key
_POSITIONS = (NOTHING + 1, NEVER - 1)  # positions beyond count as these
LOG2E = math.log2(math.e)
NEG_INF = float("-inf")


class Tokens(NamedTuple):
    """Vectors of a tile's tokens: positions of keys, bounds of queries, segments. None where nothing tests them."""

    kv: Any = None
    upper: Any = None
    lower: Any = None
    q_segment: Any = None
    kv_segment: Any = None


@dataclasses.dataclass(frozen=True)
class Rule:
    band: Band
    q: Axis
    kv: Axis
    positions: bool
    segments: bool
    scale: float
    soft_cap: float | None
    bias: bool
    float32: bool

    @classmethod
    def of(cls, call: Call, q: Axis, kv: Axis) -> Rule:
        return cls(
            call.band,
            q,
            kv,
            call.q_positions is not None,
            call.q_segments is not None,
            call.scale,
            call.soft_cap,
            call.bias is not None,
            call.query.dtype == jnp.float32,
        )

    # The numbers per token that the element rule needs: `q_tokens` and `kv_tokens` make arrays of them outside a
    # kernel, `q_vectors` and `kv_vectors` read or compute them inside.

    @property
    def q_rows(self) -> int:
        """Numbers per query in `q_tokens`: the bounds, if positions are given, and the segment."""
        return self.positions * (1 + (self.band.left is not None)) + self.segments

    @property
    def kv_rows(self) -> int:
        return self.positions + self.segments

    def q_tokens(self, call: Call) -> Array:
        """[B, tiles, q_rows, tile]"""
        rows = []
        if call.q_positions is not None:
            upper, lower = _bounds(call.q_positions, self.band)
            rows.append(self.q.cut(upper, 1, NOTHING))
            if lower is not None:
                rows.append(self.q.cut(lower, 1))
        if call.q_segments is not None:
            rows.append(self.q.cut(call.q_segments, 1, -1))
        return jnp.stack(rows, 2)

    def kv_tokens(self, call: Call) -> Array:
        """[B, tiles, kv_rows, tile]"""
        rows = []
        if call.kv_positions is not None:
            rows.append(self.kv.cut(jnp.clip(call.kv_positions, *_POSITIONS), 1, NEVER))
        if call.kv_segments is not None:
            rows.append(self.kv.cut(call.kv_segments, 1, -2))
        return jnp.stack(rows, 2)

    def q_vectors(self, index: Callable[[Axis, int], Array], read: Callable[[int], Array]) -> Tokens:
        """`index(axis, fill)`: the indices of the tokens, `fill` in padding; `read(r)`: row r of `q_tokens`."""
        rows = iter(range(self.q_rows))
        if self.positions:
            upper = read(next(rows))
            lower = read(next(rows)) if self.band.left is not None else None
        else:
            limit = self.q.length + self.kv.length
            i = index(self.q, NOTHING)
            right = limit if self.band.right is None else min(self.band.right, limit)
            upper = jnp.where(i == NOTHING, NOTHING, i + right)
            lower = None if self.band.left is None else i - min(self.band.left, limit)
        return Tokens(upper=upper, lower=lower, q_segment=read(next(rows)) if self.segments else None)

    def kv_vectors(self, index: Callable[[Axis, int], Array], read: Callable[[int], Array]) -> Tokens:
        kv = read(0) if self.positions else index(self.kv, NEVER)
        return Tokens(kv=kv, kv_segment=read(int(self.positions)) if self.segments else None)

    def attends(self, q: Tokens, kv: Tokens) -> Array:
        ok = kv.kv <= q.upper
        if q.lower is not None:
            ok &= kv.kv >= q.lower
        if self.segments:
            ok &= q.q_segment == kv.kv_segment
        return ok

    # Logits without bias and cap are in base 2, which saves one product per element; but not in float32, where the
    # change of base would round large logits once more.

    @property
    def binary(self) -> bool:
        return self.soft_cap is None and not self.bias and not self.float32

    @property
    def unit(self) -> float:
        """Logits times this are what `exp` takes."""
        return LOG2E if self.binary else 1.0

    def exp(self, x: Array) -> Array:
        return jnp.exp2(x) if self.binary else jnp.exp(x)

    def logits(self, product: Array, bias: Array | None) -> tuple[Array, Array | None]:
        """soft_cap(scale * product + bias) in the unit that `exp` takes, and the slope of the soft cap."""
        if self.binary:
            return product * (self.scale * LOG2E), None
        x = product * self.scale
        if bias is not None:
            x = x + bias
        if self.soft_cap is None:
            return x, None
        t = jnp.tanh(x / self.soft_cap)
        return self.soft_cap * t, 1 - t * t

    def masked(self, x: Array, slope: Array | None, ok: Array) -> tuple[Array, Array | None]:
        """-inf where an element does not attend, and there a slope of 0: the slope at a NaN bias is NaN."""
        if slope is not None and self.bias:
            slope = jnp.where(ok, slope, 0.0)
        return jnp.where(ok, x, NEG_INF), slope


def _bounds(position: Array, band: Band) -> tuple[Array, Array | None]:
    """A query's largest and smallest allowed key position."""
    first, last = band.reach(jnp.clip(position, *_POSITIONS))
    upper = jnp.full_like(position, _POSITIONS[1]) if last is None else jnp.clip(last, *_POSITIONS)
    return upper, first


def row_index(axis: Axis, tile: Array, copies: int, fill: int) -> Array:
    """Indices of a tile's tokens on the sublanes, [copies * tile, 1]."""
    within = lax.broadcasted_iota(jnp.int32, (axis.tile, 1), 0)
    x = _index(axis, tile, within, fill)
    return jnp.concatenate([x] * copies) if copies > 1 else x


def lane_index(axis: Axis, tiles: list[Array], live: list[Array], fill: int) -> Array:
    """Indices of several tiles' tokens on the lanes, [1, n * tile]; fill in tiles that are not live."""
    if axis.tile % LANES == 0:
        within = lax.broadcasted_iota(jnp.int32, (1, axis.tile), 1)
        return jnp.concatenate(
            [jnp.where(ok, _index(axis, t, within, fill), fill) for t, ok in zip(tiles, live, strict=True)], 1
        )
    lane = lax.broadcasted_iota(jnp.int32, (1, axis.tile * len(tiles)), 1)
    x = jnp.full_like(lane, fill)
    for e, (t, ok) in enumerate(zip(tiles, live, strict=True)):
        within = lane - e * axis.tile
        here = (within >= 0) & (within < axis.tile) & ok
        x = jnp.where(here, _index(axis, t, within, fill), x)
    return x


def _index(axis: Axis, tile: Array, within: Array, fill: int) -> Array:
    if axis.blocks == 1 or axis.pitch == axis.block:
        i = tile * axis.tile + within
        return jnp.where(i < axis.length, i, fill) if axis.padded else i
    block, sub = lax.div(tile, axis.split), lax.rem(tile, axis.split)
    in_block = sub * axis.tile + within
    i = block * axis.block + in_block
    return jnp.where((in_block < axis.block) & (i < axis.length), i, fill)


def spread(x: Array, width: int) -> Array:
    """[n, 128] whose lanes are all equal, as [n, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def dot(a: Array, b: Array, contract: tuple[int, int], exact: bool) -> Array:
    """float32 sums; `exact`: float32 products too, otherwise one pass of bfloat16."""
    precision = lax.Precision.HIGHEST if exact else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


# -- buffers of streamed tiles: [2, entries, rows or numbers, dim or tokens] -----------------------------------------


class Pair(NamedTuple):
    """Two streamed arrays [B, heads, tiles, tile, dim]. Those of equal shape are stacked: half the transfers."""

    first: str
    second: str

    def streams(self, first: Array, second: Array, pick: Callable) -> dict[str, Any]:
        if first.shape != second.shape:
            return {self.first: (first, pick), self.second: (second, pick)}
        return {self.first: (jnp.stack([first, second], 3), pick)}

    def read(self, refs: Any, second: bool, slot: Array, start: int, width: int) -> Array:
        """Tokens of one of the two on the sublanes, [width, dim]."""
        together = f"{self.second}_buffer" not in refs
        buffer = getattr(refs, f"{self.second if second and not together else self.first}_buffer")
        entry = buffer.shape[-2]
        which = (int(second),) if together else ()
        if width < entry:
            return buffer[(slot, start // entry, *which, slice(start % entry, start % entry + width))]
        entries = slice(start // entry, (start + width) // entry)
        return buffer[(slot, entries, *which)].reshape(width, buffer.shape[-1])


def read_lanes(buffer: Any, slot: Array, row: int, first: int, width: int) -> Array:
    """Number `row` of each token, tokens on the lanes, [1, width]."""
    entry = buffer.shape[3]
    if width < entry:
        return buffer[slot, first // entry, row : row + 1, first % entry : first % entry + width]
    parts = [buffer[slot, e, row : row + 1] for e in range(first // entry, (first + width) // entry)]
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def cut_lanes(tokens: Tokens, first: int, width: int) -> Tokens:
    return Tokens(*(None if x is None else x[:, first : first + width] for x in tokens))


def mark_dead(x: Array, live: list[Array], fill: int) -> Array:
    """x, [1, n * tile], with `fill` in the tiles that are not live."""
    tile = x.shape[1] // len(live)
    dead = jnp.concatenate([jnp.full((1, tile), jnp.where(ok, 0, 1)) for ok in live], 1)
    return jnp.where(dead == 1, fill, x)


def row_statistics(rule: Rule, lse: Array, delta: Array) -> Array:
    """[B, H, tiles, 2, tile]: lse in the unit of `Rule.exp`, and delta. lse is +inf for rows that attend nothing or do
    not exist, so that their weights are 0.
    """
    lse = jnp.where(lse == NEG_INF, math.inf, lse * rule.unit)
    return jnp.stack([rule.q.cut(lse, 2, math.inf), rule.q.cut(delta, 2)], 3).astype(jnp.float32)
