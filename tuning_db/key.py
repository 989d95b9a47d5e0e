"""The key of a tuned configuration: which calls it is for, and which keys are near."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from xsake._ground.buckets import density_bucket, half_octaves, nearest_power_of_two

HADS = "hads"  # the operation of entries that say whether a call of HADS is faster than dense attention
REACH = 3.0  # octaves: an entry farther away is no better than the heuristic
UNKNOWN_DENSITY = 0.5  # assumed for a mask of unknown density, if no entry was tuned for unknown densities

# Sequence lengths, heads and density may differ between a call and the entry that serves it; other fields may not.
_BUCKETS = ("q_len", "kv_len", "heads", "density")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One direction of one operation on calls of about one size.

    `direction` is a field of the implementation's Config, or what a call of HADS does. `q_len`, `kv_len` and `heads`
    (batch times query heads) are powers of two; `density` is a bucket of half an octave, or None if
    unknown: then entries that were tuned for unknown densities are nearest, and then those near `UNKNOWN_DENSITY`.

    >>> key = Key.of(implementation="xla", direction="forward", dtype="float32", head_dim=64, value_dim=64, group=1,
    ...              block_q=128, block_kv=128, causal=True, q_len=5000, kv_len=5000, heads=8, density=0.5)
    >>> key.q_len, key.density
    (4096, 0.5)
    """

    operation: str = "attention"
    implementation: str
    direction: str
    dtype: str
    head_dim: int
    value_dim: int
    group: int
    block_q: int
    block_kv: int
    causal: bool
    q_len: int
    kv_len: int
    heads: int
    density: float | None

    @classmethod
    def of(cls, *, q_len: int, kv_len: int, heads: int, density: float | None, **same: Any) -> Key:
        """A key from exact sizes, each rounded to its bucket."""
        return cls(
            **same,
            q_len=nearest_power_of_two(q_len),
            kv_len=nearest_power_of_two(kv_len),
            heads=nearest_power_of_two(heads),
            density=None if density is None else density_bucket(density),
        )

    @property
    def family(self) -> tuple:
        """The fields that must be equal for an entry to serve a call."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _BUCKETS)

    @property
    def place(self) -> tuple[int, int, int, int | None]:
        """The key's place in its family: octaves of q_len, kv_len and heads, and half octaves of density."""
        q, kv, heads = (round(math.log2(n)) for n in (self.q_len, self.kv_len, self.heads))
        return q, kv, heads, None if self.density is None else half_octaves(self.density)

    def __str__(self) -> str:
        density = "any density" if self.density is None else f"density {self.density:g}"
        lengths = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return (
            f"{self.operation} {self.direction} on {self.implementation}: {self.dtype}, {lengths} tokens, {density}, "
            f"{self.heads} heads of {dims} in groups of {self.group}, blocks {self.block_q} x {self.block_kv}"
            f"{', causal' if self.causal else ''}"
        )


def places_near(place: tuple[int, int, int, int | None]) -> itertools.chain[tuple]:
    """Places within `REACH`, nearest first. Places of unknown density come last, or first if `place` has none."""
    q, kv, heads, density = place
    middle = half_octaves(UNKNOWN_DENSITY) if density is None else density
    known = ((q + a, kv + b, heads + c, middle + d) for a, b, c, d in _OFFSETS)
    unknown = ((q + a, kv + b, heads + c, None) for a, b, c, d in _OFFSETS if d == 0)
    return itertools.chain(unknown, known) if density is None else itertools.chain(known, unknown)


def _offsets() -> list[tuple[int, int, int, int]]:
    """Steps (q, kv, heads, density), nearest first: max(|q|, |kv|) + |heads| / 2 + |density| / 2 <= REACH.

    The sum is the distance. A step is an octave; of density, half an octave.
    """
    steps, halves = range(-int(REACH), int(REACH) + 1), range(-int(2 * REACH), int(2 * REACH) + 1)
    every = itertools.product(steps, steps, halves, halves)
    far = {o: max(abs(o[0]), abs(o[1])) + abs(o[2]) / 2 + abs(o[3]) / 2 for o in every}
    return sorted((o for o in far if far[o] <= REACH), key=lambda o: (far[o], o))


_OFFSETS = _offsets()
