"""Read prompts chunk by chunk and layer by layer into a cache, densely or with HADS.

One small program per chunk serves all layers of the model: it compiles in seconds where a program as large as the model
takes minutes. Keys and values are written to the cache in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from xsake.hads import chunk_counts, density_bucket
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.chunk import LayerWeights, select_chunk
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.model.cache import KVCache
from xsake.model.hads_budget import HadsBudget
from xsake.model.transformer import Transformer

UNIT = 64  # prompts without HADS are cut and padded to multiples of this many tokens


class Prompt(NamedTuple):
    """What is known once prompts are read: the last states [B, 1, width], the cache and, with HADS, pooled keys."""

    last: Float[Array, "B 1 width"]
    cache: KVCache
    pooled: tuple[PooledKeys, ...] | None


def read_prompts(
    model: Transformer,
    prompts: Any,
    *,
    capacity: int,
    hads: HadsBudget | None = None,
    chunk: int | None = None,
    pad_to: int = 0,
    mesh: Mesh | None = None,
    watch: Callable[[Float[Array, "B T width"]], None] | None = None,
) -> Prompt:
    """Read prompts of any lengths into a cache of `capacity` slots, `chunk` tokens at a time.

    `chunk` is a multiple of the profile's block, or of 64 without HADS; None reads all tokens at once. The budget holds
    in every chunk, and over every prompt to the block. Prompts are padded to `pad_to` tokens at least, which changes no
    result: prompts of other lengths then compile nothing anew. On a mesh, prompts are split over its axis "data", and
    heads as the model's weights are. `watch` is called with the last block's output for every chunk, padding included.
    """
    block = check_reading(model, prompts, capacity=capacity, hads=hads, chunk=chunk)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if pad_to > capacity:
        raise ValueError(f"{pad_to=} is beyond the cache of {capacity} tokens: make the cache larger")
    total = min(-(-max(int(lengths.max()), pad_to) // block) * block, capacity)
    padded = np.zeros((len(prompts), total), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = KVCache.empty(model.config, batch=len(prompts), capacity=capacity, dtype=model.dtype, mesh=mesh)
    reader = _Reader(model, _split(lengths, mesh, "data"), hads, mesh)
    return reader.read(padded, chunk or -(-total // block) * block, cache, watch or (lambda states: None))


def _split(x: Any, mesh: Mesh | None, *axes: str) -> Array:
    """The array on the mesh, its first dimensions split over these axes."""
    return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def check_reading(
    model: Transformer, prompts: Any, *, capacity: int, hads: HadsBudget | None, chunk: int | None
) -> int:
    """The unit in which prompts are cut. ValueError for what `read_prompts` cannot do."""
    longest, block = max(len(prompt) for prompt in prompts), UNIT if hads is None else hads.profile.block
    if longest > capacity:
        raise ValueError(f"a prompt of {longest} tokens does not fit a cache of {capacity}: make the cache larger")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1 or chunk % block):
        what = "64 tokens" if hads is None else f"the profile's block of {block} tokens"
        raise ValueError(f"{chunk=} must be a multiple of {what}")
    if hads is not None:
        hads.check(model.config, longest)
    return block


class _Reader:
    def __init__(self, model: Transformer, lengths: Int[Array, "B"], hads: HadsBudget | None, mesh: Mesh | None):
        self.model, self.lengths, self.hads, self.mesh = model, lengths, hads, mesh
        self.graph, self.weights = nnx.split(model)
        blocks = [nnx.split(block) for block in model.blocks]
        self.block_graph, self.block_weights = blocks[0][0], [weights for _, weights in blocks]

    def read(self, padded: np.ndarray, chunk: int, cache: KVCache, watch: Callable[[Array], None]) -> Prompt:
        config, batch = self.model.config, len(padded)
        keys, values = list(cache.keys), list(cache.values)
        pooled: list[PooledKeys | None] = [None] * config.layers
        learned: list[LayerWeights | None] = [None] * config.layers
        counts: Any = [[None] * config.layers] * -(-padded.shape[1] // chunk)
        if self.hads is not None:
            profile = self.hads.profile
            blocks = -(-cache.capacity // profile.block)
            shape = dict(batch=batch, kv_heads=config.kv_heads, blocks=blocks, head_dim=config.head_dim)
            empty = PooledKeys(*(_split(x, self.mesh, "data", "model") for x in PooledKeys.empty(**shape)))
            pooled = [jax.tree.map(jnp.copy, empty) for _ in range(config.layers)]
            learned = [LayerWeights.of(profile, layer) for layer in range(config.layers)]
            kept = chunk_counts(profile, self.hads.prompt, np.asarray(self.lengths).tolist(), chunk)
            counts = np.zeros((len(counts), *kept.shape[1:]), np.int32)  # chunks of padding alone keep nothing
            counts[: len(kept)] = kept
        last = jnp.zeros((batch, 1, config.width), self.model.dtype)
        for number, start in enumerate(range(0, padded.shape[1], chunk)):
            tokens = _split(padded[:, start : start + chunk], self.mesh, "data")
            x, rotation = _start(self.graph, self.weights, tokens, np.int32(start))
            for layer in range(config.layers):
                x, (keys[layer], values[layer], pooled[layer]) = _read_block(
                    self.block_graph,
                    _Static.of(self.model, self.hads, layer, start),
                    self.block_weights[layer],
                    x,
                    rotation,
                    keys[layer],
                    values[layer],
                    pooled[layer],
                    learned[layer],
                    counts[number][layer],
                    self.lengths,
                )
            watch(x)
            last = _take_last(last, x, self.lengths - 1 - start)
        filled = KVCache(keys=tuple(keys), values=tuple(values), length=self.lengths, filled=True)
        return Prompt(last, filled, None if self.hads is None else tuple(pooled))  # type: ignore[arg-type]


class _Static(NamedTuple):
    """What a block's program is compiled for."""

    attention_fn: Callable[..., Any]
    start: int
    window: int | None
    block: int | None = None
    rule: Rule | None = None
    density_hint: float | None = None

    @classmethod
    def of(cls, model: Transformer, hads: HadsBudget | None, layer: int, start: int) -> _Static:
        plain = cls(model.attention_fn, start, model.config.window_of(layer))
        if hads is None:
            return plain
        profile = hads.profile
        return plain._replace(block=profile.block, rule=profile.rule, density_hint=density_bucket(hads.prompt))


@partial(jax.jit, static_argnums=0)
def _start(graph: nnx.GraphDef, weights: Any, tokens: Array, start: Array) -> tuple[Array, Any]:
    model: Transformer = nnx.merge(graph, weights)
    return model.start(tokens, (start + jnp.arange(tokens.shape[1], dtype=jnp.int32))[None])


@jax.jit
def _take_last(last: Array, x: Array, place: Array) -> Array:
    """`last`, with the states at `place` [B] where the place is in this chunk."""
    here = (place >= 0) & (place < x.shape[1])
    found = jnp.take_along_axis(x, jnp.clip(place, 0, x.shape[1] - 1)[:, None, None], 1)
    return jnp.where(here[:, None, None], found, last)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 5, 6, 7))
def _read_block(
    graph: nnx.GraphDef,
    static: _Static,
    weights: Any,
    x: Array,
    rotation: Any,
    keys: Array,
    values: Array,
    pooled: PooledKeys | None,
    learned: LayerWeights | None,
    counts: Array | None,
    lengths: Array,
) -> tuple[Array, Any]:
    """A block's output for a chunk, and the layer's keys, values and pooled keys with those of the chunk."""
    start = static.start

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        end = start + query.shape[1]
        k = keys.at[:, start:end].set(key.astype(keys.dtype))
        v = values.at[:, start:end].set(value.astype(values.dtype))
        new = None
        # A cache that holds nothing but this chunk needs no copy of it.
        seen = (key, value) if start == 0 else (k[:, :end], v[:, :end])
        if pooled is None or learned is None or counts is None:
            options = _dense(start, static.window, query.shape[:2])
        else:
            assert static.block is not None and static.rule is not None
            new = pooled.write(key, lengths, start=start, block=static.block)
            mask = select_chunk(
                query,
                seen[0],
                new,
                learned,
                counts,
                lengths,
                start=start,
                block=static.block,
                rule=static.rule,
                density_hint=static.density_hint,
                window=static.window,
            )
            options = {"mask": mask}
            if static.window is not None and static.window < end:
                options |= _dense(start, static.window, query.shape[:2])
        return static.attention_fn(query, *seen, **options), (k, v, new)

    return nnx.merge(graph, weights)(x, rotation, attend)


def _dense(start: int, window: int | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of causal attention for queries that begin at token `start` of the keys."""
    batch, length = shape
    if start == 0:
        return {"is_causal": True} | ({} if window is None else {"local_window_size": (window - 1, 0)})
    if window is None:
        return {"local_window_size": (None, start)}
    places = jnp.arange(start + length, dtype=jnp.int32)[None]
    positions = tuple(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (places[:, start:], places))
    return {"is_causal": True, "local_window_size": (window - 1, 0), "positions": positions}
