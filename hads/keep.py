"""Keep exactly so many: the largest entries of all rows together, without sorting them together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt


def row_counts(gain: Float[Array, "*B rows n"], count: Int[Array, "*#B"]) -> Int[Array, "*B rows"]:
    """How many of each row's entries are among the `count` largest of all rows; their sum is exactly `count`.

    Rows must be sorted upwards. Negative entries are never counted: there must be `count` others. Of equal entries,
    those of later rows come first.

    >>> import jax.numpy as jnp
    >>> row_counts(jnp.array([[1.0, 3.0], [1.0, 2.0]]), jnp.array(3)).tolist()
    [1, 2]
    """
    # Nonnegative floats order as their bits do; 0 is left for negative ones.
    bits = jax.lax.bitcast_convert_type(gain, jnp.uint32)
    bits = jnp.where(gain < 0, jnp.uint32(0), bits + jnp.uint32(1))
    cut = _largest_cut(bits, count)[..., None]
    reach, above = _at_least(bits, cut)[..., 0], _at_least(bits, cut + jnp.uint32(1))[..., 0]
    left = jnp.broadcast_to(count, above.shape[:-1]) - above.sum(-1)
    equal = reach - above
    later = jnp.cumsum(equal[..., ::-1], -1)[..., ::-1] - equal
    return above + jnp.clip(left[..., None] - later, 0, equal)


def _largest_cut(bits: UInt[Array, "*B rows n"], count: Int[Array, "*#B"]) -> UInt[Array, "*B"]:
    """The largest number that at least `count` entries reach, found four bits at a time."""
    digits = jnp.arange(16, dtype=jnp.uint32)

    def step(i: Array, cut: Array) -> Array:
        shift = jnp.uint32(28) - jnp.uint32(4) * i.astype(jnp.uint32)
        reach = _at_least(bits, cut[..., None] + (digits << shift)).sum(-2)
        enough = (reach >= jnp.asarray(count)[..., None]).sum(-1) - 1  # that many digits, one after the other
        return cut + (enough.astype(jnp.uint32) << shift)

    return jax.lax.fori_loop(0, 8, step, jnp.zeros(bits.shape[:-2], jnp.uint32))


def _at_least(bits: UInt[Array, "*B rows n"], cuts: UInt[Array, "*B x"]) -> Int[Array, "*B rows x"]:
    """Entries of each sorted row that reach each cut: by bisection, so that a row costs log n looks, not n."""
    n = bits.shape[-1]
    cuts = cuts[..., None, :]
    below = jnp.zeros((*bits.shape[:-1], cuts.shape[-1]), jnp.int32)
    for step in (1 << p for p in reversed(range(n.bit_length()))):
        probe = below + (step - 1)
        value = jnp.take_along_axis(bits, jnp.minimum(probe, n - 1), -1)
        below = jnp.where((probe < n) & (value < cuts), below + step, below)
    return n - below
