"""Keep an exact number of the largest entries over many rows, without sorting the rows into one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped, UInt

from xsake._ground.trace import vary, varying_axes
from xsake.hads.profile.causal_grid import CausalGrid


def keep_largest(
    priority: Float[Array, "B H rows n"],
    grid: CausalGrid,
    count: Int[Array, ""] | Int[Array, "B"] | int,
    forced: Array | np.ndarray | None = None,
) -> Bool[Array, "B H rows n"]:
    """Exactly `count` causal blocks per sequence, over all heads: the forced blocks and the blocks of highest priority.

    `count` is the same for all sequences, or one number per sequence.

    Among equal priorities later rows come first, so that a pattern with coarse steps gives its remainder to the last
    rows, and in a row the nearest blocks. Priorities are told apart to 2 ** -12 of their size with 2048 blocks per row.
    """
    low = (1 << max(grid.columns - 1, 1).bit_length()) - 1
    priority = jnp.where(priority == 0, 0.0, priority.astype(jnp.float32))  # -0 and 0 are equal, their bits are not
    bits = jax.lax.bitcast_convert_type(priority, jnp.int32)
    signed = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))  # orders as the floats do
    order = jax.lax.bitcast_convert_type(signed, jnp.uint32) ^ jnp.uint32(1 << 31)
    order = jnp.where(np.zeros((1, 1), bool) if forced is None else forced, jnp.uint32(0xFFFFFFFF), order)
    order = jnp.maximum(order & jnp.uint32(~low & 0xFFFFFFFF), jnp.uint32(low + 1))
    column = jnp.arange(grid.columns, dtype=jnp.uint32)[None, None, None]
    keys = jnp.where(grid.causal(), order | column, jnp.uint32(0))
    rows = jnp.sort(keys, -1)
    b, h, n, _ = rows.shape
    flat = (rows & jnp.uint32(~low & 0xFFFFFFFF)).reshape(b, h * n, -1)
    kept = row_counts(flat, jnp.asarray(count, jnp.int32)).reshape(b, h, n)
    return kept_blocks(keys, rows, kept)


def kept_blocks(
    keys: Shaped[Array, "*rows n"], in_order: Shaped[Array, "*rows n"], kept: Int[Array, "*rows"]
) -> Bool[Array, "*rows n"]:
    """Each row's `kept` blocks with the largest keys; `in_order` holds the keys sorted upwards."""
    last = jnp.take_along_axis(in_order, keys.shape[-1] - jnp.maximum(kept, 1)[..., None], -1)
    return (keys >= last) & (kept > 0)[..., None]


def nonnegative_order(gain: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Integers that order as the floats do; 0 for every negative float."""
    bits = jax.lax.bitcast_convert_type(gain, jnp.uint32)
    return jnp.where(gain < 0, jnp.uint32(0), bits + jnp.uint32(1))


def row_counts(
    order: UInt[Array, "*B rows n"], count: Int[Array, "*#B"], axes: tuple[str, ...] = ()
) -> Int[Array, "*B rows"]:
    """How many of each row's entries are among the `count` largest of all rows; their sum is exactly `count`.

    Entries that are 0 are never counted: there must be `count` others. Among equal entries, later rows come first.
    `axes` are mesh axes of `jax.shard_map` over which the rows are sharded: `count` is of the rows of all shards.

    >>> import jax.numpy as jnp
    >>> row_counts(jnp.array([[1, 3], [1, 2]], jnp.uint32), jnp.array(3)).tolist()
    [1, 2]
    """
    cut = _largest_cut(order, count, axes)[..., None, None]
    reach, above = (order >= cut).sum(-1), (order > cut).sum(-1)
    left = jnp.broadcast_to(count, above.shape[:-1]) - over_shards(axes, above.sum(-1))
    equal = reach - above
    later = jnp.cumsum(equal[..., ::-1], -1)[..., ::-1] - equal
    if axes:
        of_shards = jax.lax.all_gather(equal.sum(-1), axes)  # one number per shard and sequence
        is_later = jnp.arange(len(of_shards)) > jax.lax.axis_index(axes)
        later = later + jnp.where(is_later.reshape(-1, *(1,) * (left.ndim)), of_shards, 0).sum(0)[..., None]
    return above + jnp.clip(left[..., None] - later, 0, equal)


def _largest_cut(order: UInt[Array, "*B rows n"], count: Int[Array, "*#B"], axes: tuple[str, ...]) -> UInt[Array, "*B"]:
    """The largest number that at least `count` entries reach, four bits at a time.

    One pass compares every entry with fifteen cuts: that is a few launches, where a search per row would take many. On
    a CPU, where launches are cheap, the passes are a loop: eight times less to compile.
    """
    digits = jax.lax.broadcast_to_rank(jnp.arange(1, 16, dtype=jnp.uint32), order.ndim - 1)
    wanted = jax.lax.broadcast_to_rank(jnp.asarray(count), order.ndim - 2)[..., None]

    def four_bits(at: Array, cut: Array) -> Array:
        shift = jnp.asarray(28 - 4 * at, jnp.uint32)
        cuts = cut[..., None] + (digits << shift)
        reach = over_shards(axes, (order[..., None] >= cuts[..., None, None, :]).sum((-3, -2)))
        return cut + ((reach >= wanted).sum(-1).astype(jnp.uint32) << shift)

    cut = vary(jnp.zeros(order.shape[:-2], jnp.uint32), varying_axes((order, wanted)) - set(axes))
    return jax.lax.fori_loop(0, 8, four_bits, cut, unroll=jax.default_backend() != "cpu")


def over_shards(axes: tuple[str, ...], counts: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The sum over all shards."""
    return jax.lax.psum(counts, axes) if axes else counts
