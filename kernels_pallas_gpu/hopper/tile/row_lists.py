"""The block lists of a mask inside a kernel: rows of blocks for the forward and dQ, columns for dK/dV."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class RowLists(NamedTuple):
    """`indices` i32[b, h, N], `row_ptr` i32[b, h, n + 1], `num_full` i32[b, h, n], `order` i32[b, h, n] or None."""

    indices: jax.Array
    row_ptr: jax.Array
    num_full: jax.Array
    order: jax.Array | None = None


class ListRefs(NamedTuple):
    """The arrays of `RowLists` as refs to global memory, inside a kernel; `order` may be None."""

    indices: Any
    row_ptr: Any
    num_full: Any
    order: Any = None

    def row(self, batch: Any, head: Any, row: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(begin, full_end, end) of a row in `indices`.

        They are clamped, because the row pointers of a mask that overflowed its capacity point past the end.
        """
        capacity = jnp.int32(self.indices.shape[-1])
        begin = lax.min(self.row_ptr[batch, head, row], capacity)
        end = lax.min(self.row_ptr[batch, head, row + 1], capacity)
        full_end = lax.min(begin + self.num_full[batch, head, row], end)
        return begin, full_end, end

    def ranked(self, batch: Any, head: Any, rank: Any) -> jax.Array:
        """The row of rank `rank` by length, longest first."""
        return rank if self.order is None else self.order[batch, head, rank]


def list_coords(lists: Any, batch: Any, head: Any, *, num_q_heads: int, num_kv_heads: int) -> tuple[Any, Any]:
    """(batch, head) of the list that serves query head `head`.

    There is one list per batch entry or one for all, and one per query head, per K/V head or for all heads.
    """
    list_batch, list_heads = lists.indices.shape[:2]
    if list_heads not in (1, num_kv_heads, num_q_heads):
        raise ValueError(f"{list_heads=} must be 1, {num_kv_heads=} or {num_q_heads=}")
    b = jnp.int32(0) if list_batch == 1 else batch
    if list_heads == 1:
        return b, jnp.int32(0)
    if list_heads == num_q_heads:
        return b, head
    return b, lax.div(head, jnp.int32(num_q_heads // num_kv_heads))
