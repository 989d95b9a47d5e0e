"""The next token from its logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import maybe, number, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """Takes the likeliest token at temperature 0; otherwise draws one, within the bounds of `top_k` and `top_p`.

    The token is -1 where the largest logit is not finite.

    Args:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only the `top_k` likeliest tokens may be drawn.
      top_p: only the fewest tokens whose probabilities (within `top_k`) sum to at least `top_p` may be drawn.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
    >>> Sampler()(logits, jax.random.key(0)).tolist()
    [1]
    """

    temperature: float = field(number(least=0), default=0.0)
    top_k: int | None = field(maybe(whole()), default=None)
    top_p: float | None = field(maybe(number(above=0, most=1)), default=None)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, logits: Float[Array, "B vocab"], key: Key[Array, ""]) -> Int[Array, " B"]:
        return jnp.where(jnp.isfinite(logits.max(-1)), self._take(logits, key), -1)

    def _take(self, logits: Array, key: Array) -> Array:
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            falling = jnp.sort(logits, axis=-1, descending=True)
            share = jax.nn.softmax(falling)
            before = jnp.cumsum(share, -1) - share  # sum over likelier tokens: 0 for the likeliest, which stays
            least = jnp.min(jnp.where(before < self.top_p, falling, jnp.inf), -1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)
