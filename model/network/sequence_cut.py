"""Sequences that are cut over the devices of a mesh's axis "sequence"."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xsake
from xsake.hads.mask.lists.order import ORDERS

AXIS = "sequence"
_SMALLEST_BLOCK = 16  # into which `xsake.sharded_attention` divides a call without a mask


@dataclasses.dataclass(frozen=True)
class SequenceCut:
    """Where the tokens of a sequence lie on the axis, and how keys and values travel over it."""

    mesh: Mesh
    order: str
    exchange: str
    capacity: int | None = None

    @classmethod
    def of(cls, mesh: Mesh | None, order: str, exchange: str, capacity: int | None = None) -> SequenceCut | None:
        """None where the mesh does not cut sequences: on one shard, every order is the sequence's own."""
        if order not in ORDERS:
            raise ValueError(f"{order=} must be one of {', '.join(map(repr, ORDERS))}")
        return None if mesh is None or mesh.shape.get(AXIS, 1) == 1 else cls(mesh, order, exchange, capacity)

    @property
    def shards(self) -> int:
        return self.mesh.shape[AXIS]

    @property
    def data(self) -> str | None:
        return self._present("data")

    def _present(self, axis: str) -> str | None:
        return axis if axis in self.mesh.axis_names else None

    def lay(self, x: Any) -> Array:
        """Tokens [B, T, ...] of the sequence, in the order of the shards and on them."""
        return self.hold(xsake.zigzag(x, self.shards) if self.order == "zigzag" else jnp.asarray(x))

    def natural(self, x: Array) -> Array:
        """Heads [B, T, heads, D] in the order of the sequence, still cut: no device gathers them.

        A device holds two pieces of a zigzag, an even and an odd one; each goes to the device that holds it in order.
        """
        if self.order == "contiguous":
            return x
        shards = self.shards
        pieces = [sorted((i, 2 * shards - 1 - i), key=lambda piece: piece % 2) for i in range(shards)]

        def move(x: Array) -> Array:
            early, late = jnp.split(x, 2, axis=1)
            is_even = jax.lax.axis_index(AXIS) % 2 == 0
            halves = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
            moved = [
                jax.lax.ppermute(half, AXIS, [(i, pieces[i][odd] // 2) for i in range(shards)])
                for odd, half in enumerate(halves)
            ]
            return jnp.concatenate(moved, axis=1)

        where = PartitionSpec(self.data, AXIS, self._present("model"))
        return jax.shard_map(move, mesh=self.mesh, in_specs=where, out_specs=where)(x)

    def positions(self, length: int) -> Array:
        """i32[1, T]: the place in its sequence of every token, as they lie."""
        places = jnp.arange(length, dtype=jnp.int32)[None]
        return xsake.zigzag(places, self.shards) if self.order == "zigzag" else places

    def hold(self, x: Array) -> Array:
        """Keep tokens [B, T, ...] where they are: XLA may not gather them."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.data, AXIS)))

    def rows(self, x: Array) -> Array:
        """Tokens [B, T, ...] with the tokens of each device in a row of their own: [devices, tokens, ...].

        A loss, to which the order of tokens is nothing, can then walk all devices' rows at the same pace.
        """
        batch, length, *rest = x.shape
        groups = 1 if self.data is None else self.mesh.shape[self.data]
        parts = x.reshape(groups, batch // groups, self.shards, length // self.shards, *rest).swapaxes(1, 2)
        axes = tuple(axis for axis in (self.data, AXIS) if axis is not None)
        where = NamedSharding(self.mesh, PartitionSpec(axes))
        return jax.lax.with_sharding_constraint(parts.reshape(groups * self.shards, -1, *rest), where)

    def attend(self, query: Array, key: Array, value: Array, options: dict[str, Any]) -> Array:
        return xsake.sharded_attention(
            query,
            key,
            value,
            mesh=self.mesh,
            batch=self.data,
            heads=self._present("model"),
            sequence=AXIS,
            exchange=self.exchange,
            order=self.order,
            capacity=self.capacity,
            **options,
        )


def choose_order(order: str | None, *, length: int, shards: int, block: int | None) -> str:
    """The order in which sequences of `length` lie on `shards` devices; None for zigzag where whole blocks allow it.

    `block` is that of the masks, None without masks. ValueError for lengths that cannot be cut.

    >>> choose_order(None, length=1024, shards=4, block=128), choose_order(None, length=1024, shards=8, block=128)
    ('zigzag', 'contiguous')
    """
    if order is not None and order not in ORDERS:
        raise ValueError(f"{order=} must be one of {', '.join(map(repr, ORDERS))}")
    if shards == 1:
        return "contiguous"
    if length % shards:
        raise ValueError(
            f"{length=} cannot be divided over the mesh's sequence={shards}: use a multiple of {shards} tokens"
        )
    unit = 2 * shards * (block or _SMALLEST_BLOCK)
    fits = length % unit == 0
    if order == "zigzag" and not fits:
        raise ValueError(
            f'{length=} cannot lie in order="zigzag" on the mesh\'s sequence={shards}: use a multiple of {unit} '
            f'tokens (2 x {shards} pieces of whole blocks of {block or _SMALLEST_BLOCK}), or order="contiguous"'
        )
    return order or ("zigzag" if fits else "contiguous")
