"""Compressed rows of a traced mask, without a sort and without a scan over the blocks.

On a GPU a kernel writes them (`triton_compact`). Elsewhere a row's active blocks are packed into words of 32 bits. How
many come before a block is then the count of the words before its own, a short sum, and of the lower bits in its own
word: a block knows its slot from what lies next to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Int, UInt

from xsake._ground.device import on_gpu
from xsake._ground.trace import interpret, interpreting, jit_may_partition, name_of_mesh

_MAX_COLUMNS = 8192  # of the kernel


def compact(
    active: Bool[Array, "b h rows columns"], full: Bool[Array | np.ndarray, "*lead rows columns"], capacity: int
) -> tuple[Int[Array, "b h {capacity}"], Int[Array, "b h rows_and_one"], Int[Array, "b h rows"]]:
    """(columns of the active blocks row after row, row_ptr, num_full): in a row full ones ascending, then the others.

    `full` is [rows, columns], or broadcasts to the shape of `active`. What does not fit the capacity is left out, and
    row_ptr counts it. Slots past the last entry hold anything.
    """
    b, h, _, columns = active.shape
    if b * h * capacity >= 2**31:
        raise ValueError(f"{b} x {h} lists of {capacity} blocks are more than 2**31 slots: give a smaller capacity")
    by_xla = partial(_by_xla, full, capacity)
    if columns > _MAX_COLUMNS or (full.ndim > 2 and jit_may_partition()):  # a partitioned kernel has one for all
        return by_xla(active)
    return on_gpu(partial(_by_kernel, full, capacity), by_xla, active)


def _by_kernel(full: Any, capacity: int, active: Array) -> tuple[Array, Array, Array]:
    return _partitioned_kernel(full, capacity)(active) if jit_may_partition() else _kernel(full, capacity, active)


def _kernel(full: Any, capacity: int, active: Array) -> tuple[Array, Array, Array]:
    from xsake.hads.mask.lists.triton_compact import compact

    return compact(active, full, capacity)


def _partitioned_kernel(full: Any, capacity: int) -> Callable[[Array], tuple[Array, Array, Array]]:
    """`_kernel`, which jit partitions over batch and heads. `vmap` takes XLA's program."""
    kernel, named, interpreted = partial(_kernel, full, capacity), name_of_mesh(), interpreting()

    def partition(mesh: Any, arguments: Any, results: Any) -> tuple[Any, Callable, Any, Any]:
        lead = NamedSharding(mesh, PartitionSpec(*(*arguments[0].sharding.spec, None, None)[:2]))
        return mesh, run, (lead,) * 3, (lead, *(NamedSharding(mesh, PartitionSpec()) for _ in named))

    def run(active: Array, *_: Array) -> tuple[Array, Array, Array]:
        with interpret(interpreted):  # JAX may trace this again on a thread of its own
            return kernel(active)

    # A partitioned function may have no constants: those of the kernel inside jit are not its own.
    split = custom_partitioning(jax.jit(run))
    split.def_partition(partition=partition, sharding_rule=f"b h r c{', ' * len(named)} -> b h s, b h p, b h r")
    call = jax.custom_batching.custom_vmap(lambda active: split(active, *named))

    @call.def_vmap
    def _(size: int, is_batched: Any, active: Array) -> Any:
        return jax.vmap(partial(_by_xla, full, capacity))(active), (True,) * 3

    return call


def _by_xla(full: Any, capacity: int, active: Array) -> tuple[Array, Array, Array]:
    b, h, _, columns = active.shape
    full = full.reshape((1,) * (4 - full.ndim) + full.shape)
    first, second = _pack(active & full), _pack(active & ~full)
    first_counts, second_counts = _ones(first), _ones(second)
    num_full = first_counts.sum(-1)
    ends = jnp.cumsum(num_full + second_counts.sum(-1), -1, dtype=jnp.int32)
    row_ptr = jnp.concatenate([jnp.zeros((b, h, 1), jnp.int32), ends], -1)

    start = row_ptr[..., :-1, None]
    first_slot = _slots(first, first_counts, start)
    second_slot = _slots(second, second_counts, start + num_full[..., None])
    slot = jnp.where(full, first_slot[..., :columns], second_slot[..., :columns])
    place = jnp.where(active & (slot < capacity), slot, capacity)  # out of range: dropped
    column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), place.shape)

    def put(place: Array, column: Array) -> Array:
        return jnp.zeros(capacity, jnp.int32).at[place].set(column, mode="drop", unique_indices=True)

    # Head by head: jit partitions such a scatter over batch and heads, where it would gather one flat scatter.
    lists = jax.vmap(jax.vmap(put))(place.reshape(b, h, -1), column.reshape(b, h, -1))
    return lists, row_ptr, num_full


def _pack(bits: Bool[Array, "*lead columns"]) -> UInt[Array, "*lead words"]:
    """Bit k of word w is column 32 w + k."""
    words = -(-bits.shape[-1] // 32)
    padded = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, 32 * words - bits.shape[-1])])
    parts = padded.reshape(*bits.shape[:-1], words, 32).astype(jnp.uint32) << _places(bits.ndim)
    return parts.sum(-1, dtype=jnp.uint32)


def _places(lead: int) -> UInt[Array, "*lead 32"]:
    """The bits' places in a word, after as many axes."""
    return jnp.arange(32, dtype=jnp.uint32).reshape((1,) * lead + (32,))


def _ones(words: UInt[Array, "*shape"]) -> Int[Array, "*shape"]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _slots(
    words: UInt[Array, "*lead words"], counts: Int[Array, "*lead words"], start: Int[Array, "*lead 1"]
) -> Int[Array, "*lead bits"]:
    """The slot of each bit if it is set: `start` and the set bits before it."""
    before = start + jnp.cumsum(counts, -1, dtype=jnp.int32) - counts
    lower = (jnp.uint32(1) << _places(words.ndim)) - jnp.uint32(1)
    inside = before[..., None] + _ones(words[..., None] & lower)
    return inside.reshape(*words.shape[:-1], -1)
