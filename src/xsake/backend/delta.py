"""delta = rowsum(d_out * out) - d_lse: what a row's softmax takes off the gradient of its weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


class DeltaParts(NamedTuple):
    """The parts of delta. A backend whose kernel reads d_out anyway sums them there, and saves a pass over both."""

    out: Float[Array, "B T H Dv"]
    d_lse: Float[Array, "B H T"] | None  # None: zeros

    def summed(self, lse: Array, d_out: Array) -> Array:
        """delta [B, H, T] of every row."""
        weight = jnp.einsum(
            "bthd,bthd->bht",
            self.out,
            d_out.astype(self.out.dtype),
            preferred_element_type=lse.dtype,
            precision=jax.lax.Precision.HIGHEST,
        )
        # Computed before anything else: a GPU reads far more slowly where it is fused with a change of order behind it.
        weight = jax.lax.optimization_barrier(weight)
        return weight if self.d_lse is None else weight - self.d_lse

    def of_live_rows(self, q_segments: Int[Array, "B T"] | None, lse: Array, d_out: Array) -> Array:
        """delta [B, H, T], but 0 for a row that attends nothing."""
        return of_live_rows(q_segments, lse, self.summed(lse, d_out))


def of_live_rows(q_segments: Int[Array, "B T"] | None, lse: Array, delta: Array) -> Array:
    """delta, but 0 for a row that attends nothing: it has no share in dQ, dK and dV, whatever its cotangent is, and
    0 * NaN must not get in.
    """
    attends = lse != -jnp.inf
    if q_segments is not None:
        attends &= (q_segments >= 0)[:, None, :]
    return jnp.where(attends, delta, 0.0)


def sink_gradient(sink_lse: Array, lse: Array, delta: Array) -> Array:
    """A sink is a logit whose value is 0, so its gradient is its weight times -delta, and 0 where there is no sink."""
    sink = sink_lse[:, :, None]
    d_sink = -jnp.where(sink == -jnp.inf, 0.0, jnp.exp(sink - lse) * delta).sum(-1)
    if sink_lse.shape[0] == 1:
        d_sink = d_sink.sum(0, keepdims=True)
    return d_sink.astype(sink_lse.dtype)
