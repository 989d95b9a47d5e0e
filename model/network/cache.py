"""Keys and values of the tokens that a model has already seen."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from xsake.model.network.config import ModelConfig

_UNIT = 64  # slots that are taken together


@partial(jax.tree_util.register_dataclass, data_fields=("keys", "values", "length"), meta_fields=("filled",))
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """A slot for each token of each sequence; token n of a sequence is in slot n.

    Sequences may have different lengths: the next tokens of a sequence are written at its own length. Slots past a
    sequence's length are never attended to, and the next tokens overwrite them. A token past the capacity is lost, and
    the model's states for that token are NaN. `filled` is known while tracing: with an empty cache, a prompt attends to
    itself alone, as without a cache, so that prefill costs the same and takes the same masks.

    >>> from xsake.model import PRESETS
    >>> KVCache.empty(PRESETS["tiny"], batch=2, capacity=100).capacity
    100
    """

    keys: tuple[Array, ...]  # per layer, [B, capacity, kv_heads, head_dim]
    values: tuple[Array, ...]
    length: Array  # i32[B]
    filled: bool = False

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.bfloat16,
        mesh: Mesh | None = None,
    ) -> KVCache:
        """Room for `capacity` tokens of each of `batch` sequences; `dtype` must be the model's.

        On a mesh, sequences are split over its axis "data" and KV heads over its axis "model".
        """
        check_size(config, batch=batch, capacity=capacity)
        shape = (batch, capacity, config.kv_heads, config.head_dim)
        where = None if mesh is None else NamedSharding(mesh, PartitionSpec("data", None, "model", None))
        keys, values = (tuple(jnp.zeros(shape, dtype, device=where) for _ in range(config.layers)) for _ in range(2))
        return cls(keys=keys, values=values, length=jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    def check_room(self, tokens: int) -> None:
        """Raise ValueError if `tokens` more do not fit. Only where lengths are concrete: under jit, states are NaN."""
        longest = int(np.asarray(self.length).max())
        if longest + tokens > self.capacity:
            raise ValueError(
                f"the cache is full: it has room for {self.capacity} tokens, holds {longest}, and {tokens} more are "
                f"given; make a cache of at least capacity={longest + tokens}"
            )

    def slots(self, tokens: int) -> Array:
        """i32[B, tokens]: the slots of the next tokens, which are also their positions."""
        return self.length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]

    def positions(self) -> Array:
        """i32[B, capacity]: the positions of all slots. Taken once and given to all layers, they are computed once."""
        positions = jnp.arange(self.capacity, dtype=jnp.int32)
        # Without the barrier XLA computes them again in every layer.
        return jax.lax.optimization_barrier(jnp.broadcast_to(positions, (len(self.length), self.capacity)))

    def window(self, layer: int, tokens: int, size: int) -> tuple[Array, Array, Array]:
        """Keys and values [B, S, K, D] that the next `tokens` tokens see of a layer with a window, and their positions.

        The tokens are written already. A few slots more than the tokens see are among them.
        """
        count = min(-(-(size - 1 + tokens) // _UNIT) * _UNIT, self.capacity)
        first = jnp.clip(self.length - size + 1, 0, self.capacity - count)
        cut = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, count))
        places = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        return cut(self.keys[layer], first), cut(self.values[layer], first), places

    def write(self, layer: int, key: Array, value: Array) -> KVCache:
        """The cache with one layer's keys and values [B, T, K, D] of the next tokens written."""
        rows = jnp.arange(len(key))[:, None], self.slots(key.shape[1])

        def put(layers: tuple, new: Array) -> tuple:
            changed = layers[layer].at[rows].set(new.astype(layers[layer].dtype), mode="drop", unique_indices=True)
            return (*layers[:layer], changed, *layers[layer + 1 :])

        return dataclasses.replace(self, keys=put(self.keys, key), values=put(self.values, value))

    def advance(self, tokens: int) -> KVCache:
        """The cache after every layer has written `tokens` new tokens."""
        return dataclasses.replace(self, length=self.length + tokens, filled=True)


def check_size(config: ModelConfig, *, batch: int, capacity: int) -> None:
    """Raise ValueError if a model cannot have a cache of this size."""
    if batch < 1:
        raise ValueError(f"{batch=} must be at least 1")
    if not 1 <= capacity <= config.context:
        raise ValueError(f"{capacity=} must be between 1 and the model's context of {config.context} tokens")
