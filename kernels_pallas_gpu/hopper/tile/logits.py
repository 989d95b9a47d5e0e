"""From products of queries and keys to logits, and in the gradients to probabilities.

S = soft_cap(scale * Q K^T + bias), masked    P = exp(S - lse)
dS = P * (dO V^T - delta) * soft_cap'
dQ = scale * dS K    dK = scale * dS^T Q      dV = P^T dO
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
PART = 64  # columns computed at a time in a tile with a mask, bias or soft cap, whose values take registers


def soft_cap_tanh(x: Array, cap: float) -> Array:
    """tanh(x / cap) by exp2, with an absolute error of at most 1e-7: tanh.approx has a relative error of 5e-4."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * jnp.float32(2.0 * LOG2E / cap)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitRule:
    """How logits become probabilities; all of it known while tracing."""

    scale: float
    soft_cap: float | None
    has_bias: bool
    # One bias row serves all queries. Rows past the last query have weight 0, but 0 times a NaN bias would reach dK:
    # such rows are masked.
    rows_share_bias: bool = False

    @property
    def folds_lse(self) -> bool:
        """Whether the accumulator of S starts at -lse / scale: then p = exp(scale * S), and lse takes no registers."""
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    def row_statistic(self, lse: Array) -> Array:
        """-lse / scale where `folds_lse`, else lse * log2(e). Empty rows (lse = -inf) get an infinity, for p = 0."""
        if self.folds_lse:
            return jnp.where(lse == -jnp.inf, -jnp.inf, lse * (-1.0 / self.scale))
        return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)

    def attends_nothing(self, statistic: Array) -> Array:
        """Which rows are empty, by their `row_statistic`."""
        return statistic == (-jnp.inf if self.folds_lse else jnp.inf)

    def probabilities(
        self, products: Array, lse: Array | None, bias: Array | None, mask: Array | None
    ) -> tuple[Array, Array]:
        """(p, p * soft_cap'): dS = p * soft_cap' * (dP - delta).

        `lse` is the `row_statistic`, or None where `folds_lse`: the products then contain it.
        """
        slope = None
        if self.folds_lse:
            p = jnp.exp2(products * (self.scale * LOG2E))
        else:
            logits = products * self.scale
            if bias is not None:
                logits = logits + bias
            if self.soft_cap is not None:
                t = soft_cap_tanh(logits, self.soft_cap)
                slope = 1.0 - t * t
                logits = t * self.soft_cap
            p = jnp.exp2(logits * LOG2E - lse)
        if mask is not None:
            if self.rows_share_bias:
                mask = mask & (lse < jnp.inf)
            p = jnp.where(mask, p, 0.0)
            if slope is not None and self.has_bias:
                slope = jnp.where(mask, slope, 0.0)  # the slope at a NaN bias is NaN
        return p, p if slope is None else p * slope
