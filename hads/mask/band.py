"""The element rule of an attention call: a band of relative offsets.

Causal attention and local windows are one thing, an interval that `key position - query position` must lie in:

    -left <= k - q <= right        (None is unbounded; causal is right = 0)

Everything a backend needs to know of causality and windows is this pair.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

# A side of a window from which on it excludes nothing. Sequences stay below it, and so the sum of an index and a side
# is an int32 in every kernel. Positions that a caller gives may be any int32: `Band.reach` serves these.
NO_LIMIT = 2**30
_INT32 = np.iinfo(np.int32)


def parse_window(window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """`(left, right)` of a `local_window_size` argument: an int is both sides, None is unbounded."""
    if window is None:
        return None, None
    pair = window if isinstance(window, tuple) else (window, window)
    if len(pair) != 2 or not all(
        side is None or (isinstance(side, int) and not isinstance(side, bool)) for side in pair
    ):
        raise TypeError(
            f"local_window_size must be None, an int or a (left, right) tuple of ints or None; got {window!r}"
        )
    if any(side is not None and side < 0 for side in pair):
        raise ValueError(f"local_window_size={window!r} must not be negative (0 keeps the token itself)")
    return pair


class Band(NamedTuple):
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, is_causal: bool, window: int | tuple[int | None, int | None] | None) -> Band:
        """The rule of `is_causal` and of a `local_window_size`.

        >>> Band.of(is_causal=True, window=2**31 - 1)
        Band(left=None, right=0)
        """
        left, right = (None if side is None or side >= NO_LIMIT else side for side in parse_window(window))
        if is_causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right)

    def __and__(self, other: Band) -> Band:
        def tighter(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Band(tighter(self.left, other.left), tighter(self.right, other.right))

    def __or__(self, other: Band) -> Band:
        """The narrowest band around both."""

        def looser(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else max(a, b)

        return Band(looser(self.left, other.left), looser(self.right, other.right))

    def implies(self, other: Band) -> bool:
        """Whether every offset inside this band is inside the other band too."""
        return self & other == self

    def allows(self, offset):
        """Whether `key position - query position` is inside; works on ints and arrays."""
        ok = True
        if self.left is not None:
            ok = ok & (offset >= -self.left)
        if self.right is not None:
            ok = ok & (offset <= self.right)
        return ok

    def reach(self, q_position):
        """(the first, the last) key position that a query may attend, both saturating at the ends of int32; None where
        there is no limit. The difference of two positions would wrap there.
        """
        first = last = None
        if self.left is not None:
            first = jnp.maximum(q_position, _INT32.min + self.left) - self.left if self.left else q_position
        if self.right is not None:
            last = jnp.minimum(q_position, _INT32.max - self.right) + self.right if self.right else q_position
        return first, last

    def allows_position(self, q_position, kv_position):
        """Whether keys are inside, by positions that may be any int32; the arrays broadcast."""
        first, last = self.reach(q_position)
        ok = True
        if first is not None:
            ok = ok & (kv_position >= first)
        if last is not None:
            ok = ok & (kv_position <= last)
        return ok

    def touches(self, low, high):
        """Whether some offset of the interval [low, high] is inside."""
        ok = True
        if self.left is not None:
            ok = ok & (high >= -self.left)
        if self.right is not None:
            ok = ok & (low <= self.right)
        return ok
