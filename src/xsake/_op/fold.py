"""vmap by folding: a mapped axis becomes part of the batch, so that a kernel sees one larger call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from xsake._ground.explicit import axes_of
from xsake.backend.contract import Call


@dataclasses.dataclass(frozen=True)
class Fold:
    """`size` copies of a call with `batch` sequences as one call, copy after copy.

    With `batch_first`, sequence after sequence: where explicit axes cut the batch, each device's copies of its
    sequences then lie together.
    """

    size: int
    batch: Any
    batch_first: bool

    @classmethod
    def of(cls, size: int, call: Call, mapped: Call) -> Fold:
        """`mapped` says which leaves of the call have a leading axis of that size."""
        axis = 1 if mapped.query else 0
        return cls(size, call.query.shape[axis], bool(axes_of(call.query)[axis]))

    def call(self, call: Call, mapped: Call) -> Call:
        paged = {} if call.page_table is None else self._pages(call, mapped)

        def fold_field(field: dataclasses.Field) -> Any:
            if call.page_table is not None and field.name in ("key", "value", "page_table"):
                return paged[field.name]
            share = field.metadata.get("shared_batch", False)
            return jax.tree.map(
                lambda x, m: self.array(x, m, share=share), getattr(call, field.name), getattr(mapped, field.name)
            )

        return dataclasses.replace(call, **{field.name: fold_field(field) for field in call.array_fields()})

    def array(self, x: Array, mapped: bool, *, share: bool = False) -> Array:
        """[size, b, ...] if mapped, else [b, ...], with b = 1 or batch, to [size * batch, ...].

        With `share`, an unmapped batch of 1 stays as it is.
        """
        if not mapped and share and x.shape[0] == 1:
            return x
        inner = x.shape[1:] if not mapped else x.shape[2:]
        full = jnp.broadcast_to(x if mapped else x[None], (self.size, self.batch, *inner))
        return (full.swapaxes(0, 1) if self.batch_first else full).reshape(self.size * self.batch, *inner)

    def back(self, x: Array) -> Array:
        """The inverse, [size, batch, ...]."""
        if self.batch_first:
            return x.reshape(self.batch, self.size, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(self.size, -1, *x.shape[1:])

    def _pages(self, call: Any, mapped: Any) -> dict[str, Array]:
        """Key, value and page table: pages that are mapped follow one another, and the tables count on."""
        table = self.array(call.page_table, mapped.page_table)
        if not mapped.key and not mapped.value:
            return dict(key=call.key, value=call.value, page_table=table)
        count = call.key.shape[1 if mapped.key else 0]
        pages = Fold(self.size, count, batch_first=False)
        key, value = pages.array(call.key, mapped.key), pages.array(call.value, mapped.value)
        first = self.array(jnp.arange(self.size, dtype=table.dtype)[:, None] * count, mapped=True)
        return dict(key=key, value=value, page_table=jnp.clip(table, 0, count - 1) + first[:, None])


def mappable(forward: Callable) -> Callable:
    """`forward(call)`, which gives (output, lse): `jax.vmap` of it folds the call."""
    run = custom_vmap(forward)

    @run.def_vmap
    def _(size: int, mapped: list, call: Call) -> tuple:
        fold = Fold.of(size, call, mapped[0])
        out, lse = run(fold.call(call, mapped[0]))
        return (fold.back(out), fold.back(lse)), (True, True)

    return run
