"""Which elements of a tile of listed blocks attend: by the band, by segments, and by the length of the keys."""

import dataclasses
import functools
import operator
from typing import Any

import jax
from jax import lax

from xsake.hads.mask.band import Band


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementRule:
    """An element attends where -left <= kv - q <= right, the segments are equal, and kv < kv_len.

    Args:
      band: (left, right).
      kv_len: None where no key past the end is in a tile, or where the store drops what such keys get.
      q_axis: the axis of a tile along which its queries lie; its keys lie along the other.
      any_position: the caller gives positions, which may be any int32.
    """

    band: Band
    kv_len: int | None
    q_axis: int
    any_position: bool

    @property
    def by_position(self) -> bool:
        return self.band != Band()

    def may_attend(self, q_first: Any, q_count: int, kv_first: Any, kv_count: int) -> Any:
        """Whether the indices of a tile allow some of its elements to attend. There must be a band or `kv_len`."""
        left, right = self.band
        tests = []
        if self.kv_len is not None:
            tests.append(kv_first < self.kv_len)
        if right is not None:
            tests.append(kv_first <= q_first + (q_count - 1 + right))
        if left is not None:
            tests.append(kv_first + (kv_count - 1 + left) >= q_first)
        return functools.reduce(operator.and_, tests)

    def all_attend(self, q_first: Any, q_count: int, kv_first: Any, kv_count: int) -> Any:
        """Whether the indices of a tile allow all of its elements to attend. There must be a band or `kv_len`."""
        left, right = self.band
        tests = []
        if self.kv_len is not None:
            tests.append(kv_first + (kv_count - 1) < self.kv_len)
        if right is not None:
            tests.append(kv_first + (kv_count - 1 - right) <= q_first)
        if left is not None:
            tests.append(kv_first + left >= q_first + (q_count - 1))
        return functools.reduce(operator.and_, tests)

    def attends(
        self,
        shape: tuple[int, int],
        q_position: jax.Array,
        kv_position: jax.Array,
        *,
        q_segment: jax.Array | None = None,
        kv_segment: jax.Array | None = None,
        kv_index: jax.Array | None = None,
    ) -> jax.Array | None:
        """bool[shape], or None where nothing is tested.

        Each vector has one number per query or per key, in the reduced WGMMA layout. A position is the token's index
        where the call gives no positions. `kv_index` is needed where some of the keys may be past the end.
        """

        def over_q(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, shape, [self.q_axis])

        def over_kv(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, shape, [1 - self.q_axis])

        left, right = self.band
        if self.any_position:
            first, last = self.band.reach(q_position)
        else:
            first = None if left is None else q_position - left
            last = None if right is None else q_position + right
        tests = []
        if last is not None:
            tests.append(over_q(last) >= over_kv(kv_position))
        if first is not None:
            tests.append(over_q(first) <= over_kv(kv_position))
        if q_segment is not None and kv_segment is not None:
            tests.append(over_q(q_segment) == over_kv(kv_segment))
        if kv_index is not None and self.kv_len is not None:
            tests.append(over_kv(kv_index < self.kv_len))
        return functools.reduce(operator.and_, tests) if tests else None
