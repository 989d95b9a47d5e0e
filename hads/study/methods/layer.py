"""Layer: what a method may look at when it chooses a layer's blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.keep import keep_largest
from xsake.hads.selection.rows import Rows

LOWEST = -1e30  # the least priority of a block that may be kept
Blocks = Bool[Array, "B H rows n"]
Priority = Float[Array, "B H rows n"]


@runtime_checkable
class TokenMask(Protocol):
    """A choice that no block mask can say, such as single keys: a pytree that computes its own attention."""

    def counts(self) -> Float[Array, "B H"]:
        """How much each head keeps, in blocks: its share of the causal pairs of query and key, times all blocks."""
        ...

    def attend(
        self, query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], value: Float[Array, "B T K D"]
    ) -> Float[Array, "B T H D"]: ...


class Remembered(NamedTuple):
    """A layer's blocks, and a pytree that the next layer's program finds in `Layer.memory`."""

    blocks: Blocks
    memory: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's queries and keys, its number in the model, the number of blocks to keep, and what is known beforehand.

    `with_forced` says whether HADS's forced blocks are always kept. `knowledge` is a pytree for a method that must know
    more of the model than a HADS profile says; None for all others. `last_count`, if given, is the number of blocks
    that the rule's last rows keep together, those of the largest `last_mass` where that is given too; the other rows
    share the rest of `count`. `memory` is what the layer before left (`Remembered`), None in the first layer. `lengths`
    are those of padded sequences. Everything but the grid may be traced, so that one compiled program serves every
    layer, budget and profile.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B T K D"]
    grid: CausalGrid
    number: Array | int
    count: Array | int
    profile: HadsProfile
    with_forced: Array | bool = False
    knowledge: Any = None
    last_count: Int[Array, "B"] | None = None
    last_mass: Priority | None = None
    memory: Any = None
    lengths: Int[Array, "B"] | None = None

    @property
    def forced(self) -> Array:
        return jnp.asarray(self.grid.forced()) & self.with_forced

    @property
    def rows(self) -> Rows:
        return Rows(self.grid, 0, self.lengths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.query.shape[0], self.query.shape[2], self.grid.rows, self.grid.columns

    def everywhere(self, blocks: np.ndarray | Array) -> Priority:
        """The same [rows, n] or [H, rows, n] for every sequence and head."""
        return jnp.broadcast_to(jnp.asarray(blocks, jnp.float32), self.shape)

    def keep(self, priority: Priority) -> Blocks:
        """Exactly `count` blocks: the forced ones if `with_forced`, then those of the highest priorities."""
        if self.last_count is None:
            return self._keep(priority, self.count, self.rows.allowed())
        last, allowed = self.rows.last(), self.rows.allowed()
        if self.last_mass is not None:
            priority = jnp.where(last, self.last_mass, priority)
        parts = (last, self.last_count), (~last, self.count - self.last_count)
        of_last, of_others = (self._keep(priority, count, allowed & rows) for rows, count in parts)
        return of_last | of_others

    def _keep(self, priority: Priority, count: Any, among: Array | np.ndarray) -> Blocks:
        ranked = jnp.where(among, jnp.maximum(priority, LOWEST), -jnp.inf)
        return keep_largest(ranked, self.grid, count, self.forced[None, None] & among)
