"""Read prompts chunk by chunk and layer by layer into a cache, densely or with HADS.

One small program per chunk serves all layers of the model: it compiles in seconds where a program as large as the model
takes minutes. Keys and values are written to the cache in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

import xsake
from xsake.hads import chunk_counts, density_bucket
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.chunk import LayerWeights, select_chunk
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.model.generation.hads_budget import HadsBudget
from xsake.model.network.cache import KVCache, check_size
from xsake.model.network.config import ModelConfig
from xsake.model.network.rope import Rotations, rotations
from xsake.model.network.transformer import Transformer
from xsake.tuning_db.lookup import any_of_blocks

Answers = Sequence[Sequence[int]]  # of each prompt, the tokens where earlier answers begin
UNIT = 64  # prompts without HADS are cut and padded to multiples of this many tokens


class Prompt(NamedTuple):
    """The results of reading prompts: the last states [B, 1, width], the cache and, with HADS, pooled keys; those of a
    layer that HADS leaves alone are None."""

    last: Float[Array, "B 1 width"]
    cache: KVCache
    pooled: tuple[PooledKeys | None, ...] | None


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
    answers: Answers | None = None,
) -> Prompt:
    """Read prompts of any lengths into a cache of `capacity` slots, `chunk` tokens at a time.

    `chunk` is a multiple of the height of the profile's rows, or of 64 without HADS; None reads all tokens at once.
    The budget holds in every chunk, and over every prompt to the block. Prompts are padded to `pad_to` tokens at
    least, which changes no result: prompts of other lengths then compile nothing anew. On a mesh, prompts are split
    over its axis "data", and heads as the model's weights are. `watch` is called with the last block's output for
    every chunk, padding included. `answers` say where earlier answers of each prompt begin, as in `generate`.
    """
    check_answers(prompts, answers, hads)
    block = check_reading(model.config, prompts, capacity=capacity, hads=hads, chunk=chunk)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if pad_to > capacity:
        raise ValueError(f"{pad_to=} is beyond the cache of {capacity} tokens: make the cache larger")
    total = min(-(-max(int(lengths.max()), pad_to) // block) * block, capacity)
    reader = _Reader(model, hads, mesh, capacity)
    return reader.read(
        padded(prompts, total),
        lengths,
        chunk or -(-total // block) * block,
        watch or (lambda states: None),
        answers if answers and any(answers) else None,
    )


def padded(prompts: Any, length: int) -> np.ndarray:
    """i32[B, length]: the prompts, each with zeros after it."""
    rows = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows


def _split(x: Any, mesh: Mesh | None) -> Array:
    """The array on its device, or its rows split over the mesh's axis "data"."""
    return jax.device_put(x, None if mesh is None else NamedSharding(mesh, PartitionSpec("data")))


def check_reading(
    config: ModelConfig, prompts: Any, *, capacity: int, hads: HadsBudget | None, chunk: int | None
) -> int:
    """The unit in which prompts are cut. ValueError for what `read_prompts` cannot do."""
    longest, unit = max(len(prompt) for prompt in prompts), UNIT if hads is None else hads.profile.block_q
    if longest > capacity:
        raise ValueError(f"a prompt of {longest} tokens does not fit a cache of {capacity}: make the cache larger")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1 or chunk % unit):
        what = "64 tokens" if hads is None else f"the profile's rows of {unit} tokens"
        raise ValueError(f"{chunk=} must be a multiple of {what}")
    check_size(config, batch=len(prompts), capacity=capacity)
    if hads is not None:
        hads.check(config, longest)
    return unit


def check_answers(prompts: Any, answers: Answers | None, hads: HadsBudget | None) -> None:
    """ValueError if `answers` are not places inside their prompts, or no HADS asks for them."""
    if answers is None:
        return
    if hads is None:
        raise ValueError("answers say where HADS looks closely: give hads, or leave answers out")
    if len(answers) != len(prompts):
        raise ValueError(f"answers of {len(answers)} prompts are given, and {len(prompts)} prompts")
    for number, (prompt, begin) in enumerate(zip(prompts, answers, strict=True)):
        if wrong := [at for at in begin if type(at) is not int or not 0 < at < len(prompt)]:
            raise ValueError(
                f"answers of prompt {number} begin at {wrong[0]!r}: it must be an int from 1 to {len(prompt) - 1}, the "
                f"first token of an answer among the prompt's {len(prompt)}"
            )


class _Reader:
    """Between two programs the host does as little as it can: the chip waits for it, most of all with short chunks.

    Weights are lists of arrays, which jit takes apart faster than modules. They are found by the names that they have
    in the first block: to flatten every block takes four times as long. Blocks differ only in their rotary positions.
    """

    def __init__(self, model: Transformer, hads: HadsBudget | None, mesh: Mesh | None, capacity: int):
        self.config, self.hads, self.mesh = model.config, hads, mesh
        self.embed, self.embed_tree = jax.tree.flatten(model.embed)
        named, _ = jax.tree_util.tree_flatten_with_path(model.blocks[0])
        variables = [attrgetter(".".join(key.name for key in path[:-1])) for path, _ in named]  # the last key: "value"
        self.blocks = [jax.tree.leaves([variable(block) for variable in variables]) for block in model.blocks]
        rotary = [model.config.rotary_of(layer) for layer in range(len(self.blocks))]
        trees = {kind: jax.tree.structure(model.blocks[rotary.index(kind)]) for kind in rotary}
        self.trees = [trees[kind] for kind in rotary]
        self.static = _Static(None, model.attention_fn, capacity, mesh)
        if hads is not None:
            profile = hads.profile
            blocks: dict[str, Any] = dict(block=profile.block, block_q=profile.block_q, rule=profile.rule)
            # One program serves all budgets, unless attention is tuned for densities.
            tuned = any_of_blocks(jax.local_devices()[0].device_kind, block_q=profile.block_q, block_kv=profile.block)
            hint = density_bucket(hads.prompt) if tuned and hads.prompt is not None else None
            self.static = self.static._replace(**blocks, density_hint=hint)

    def read(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        chunk: int,
        watch: Callable[[Array], None],
        answers: Answers | None,
    ) -> Prompt:
        config, chunks = self.config, -(-tokens.shape[1] // chunk)
        number = len(self.blocks)
        layers: list[Any] = [None] * number  # keys, values and pooled keys, once the first chunk is read
        learned: Any = [None] * number
        rows: Any = range(number)  # of the layers, in the counts
        counts: Any = [None] * chunks
        if self.hads is not None and (self.hads.prompt or self.hads.decode):
            learned = self.hads.learned
        if self.hads is not None and self.hads.prompt is not None:
            rows = [self.hads.profile.row(layer) for layer in rows]
            kept = chunk_counts(self.hads.profile, self.hads.prompt, lengths.tolist(), chunk, answers)
            counts = np.zeros((chunks, *kept.shape[1:]), np.int32)  # chunks of padding alone keep nothing
            counts[: len(kept)] = kept
        on_device = _split(lengths, self.mesh)
        most = max(map(len, answers)) if answers else 0
        begin = _split(padded(answers, 1 << (most - 1).bit_length()), self.mesh) if answers else None
        last: Any = None
        for number in range(chunks):
            start = number * chunk
            part = _split(tokens[:, start : start + chunk], self.mesh)
            x, turned, kept_here = _start(config, self.embed_tree, self.embed, part, np.int32(start), counts[number])
            for layer, weights in enumerate(self.blocks):
                x, layers[layer] = _read_block(
                    self.static._replace(tree=self.trees[layer], start=start, window=config.window_of(layer)),
                    weights,
                    x,
                    turned,
                    layers[layer],
                    learned[layer],
                    None if rows[layer] is None else kept_here[rows[layer]],
                    on_device,
                    begin,
                )
            watch(x)
            last = _take_last(last, x, on_device, np.int32(start))
        keys, values, pooled = zip(*layers, strict=True)
        cache = KVCache(keys=keys, values=values, length=on_device, filled=True)
        return Prompt(last, cache, None if self.hads is None else pooled)


class _Static(NamedTuple):
    """The static arguments of a block's program."""

    tree: Any  # of the block's weights
    attention_fn: Callable[..., Any]
    capacity: int
    mesh: Mesh | None
    start: int = 0
    window: int | None = None
    block: int | None = None
    block_q: int = 0
    rule: Rule | None = None
    density_hint: float | None = None

    def hold(self, x: Array, *axes: str | None) -> Array:
        """The array, split over these axes of the mesh."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*axes)))


@partial(jax.jit, static_argnums=(0, 1))
def _start(
    config: ModelConfig, tree: Any, embed: list[Array], tokens: Array, start: Array, counts: Array | None
) -> tuple[Array, Rotations, Any]:
    """(the first block's input, the rotations of its positions, the counts of each layer)."""
    positions = (start + jnp.arange(tokens.shape[1], dtype=jnp.int32))[None]
    by_layer = (None,) * config.layers if counts is None else tuple(counts)
    return jax.tree.unflatten(tree, embed)(tokens), rotations(positions, config), by_layer


@jax.jit
def _take_last(last: Array | None, x: Array, lengths: Array, start: Array) -> Array:
    """`last`, with the states of the last tokens [B] that are in this chunk."""
    place = lengths - 1 - start
    here = (place >= 0) & (place < x.shape[1])
    found = jnp.take_along_axis(x, jnp.clip(place, 0, x.shape[1] - 1)[:, None, None], 1)
    return jnp.where(here[:, None, None], found, jnp.zeros_like(found) if last is None else last)


@partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def _read_block(
    static: _Static,
    weights: list[Array],
    x: Array,
    turned: Rotations,
    before: tuple[Array, Array, PooledKeys | None] | None,
    learned: LayerWeights | None,
    counts: Array | None,
    lengths: Array,
    answers: Array | None,
) -> tuple[Array, Any]:
    """A block's output for a chunk, and the layer's keys, values and pooled keys up to the chunk's end."""
    start = static.start

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
        end, new = start + query.shape[1], None
        if before is None:
            rest = ((0, 0), (0, static.capacity - end), (0, 0), (0, 0))
            k, v = (static.hold(jnp.pad(part, rest), "data", None, "model", None) for part in (key, value))
        else:
            k, v = (old.at[:, start:end].set(part) for old, part in zip(before[:2], (key, value), strict=True))
        # No rule and no list reaches past the chunk's end, so that xsake takes the cache as it is: a part of it would
        # be a copy. Other functions, and rules of positions, would compute what is past the end too.
        as_it_is = static.attention_fn is xsake.attention and static.window is None
        seen = (key, value) if start == 0 else (k, v) if as_it_is else (k[:, :end], v[:, :end])
        if learned is not None:
            assert static.block is not None
            pooled = before[2] if before is not None else None
            if pooled is None:
                batch, _, kv_heads, head_dim = key.shape
                blocks = -(-static.capacity // static.block)
                pooled = PooledKeys.empty(batch=batch, kv_heads=kv_heads, blocks=blocks, head_dim=head_dim)
            new = pooled.write(key, lengths, start=start, block=static.block)
            new = PooledKeys(static.hold(new.features, "data", "model"))
        if learned is None or counts is None:
            first = 0 if static.window is None else max(start - static.window + 1, 0) // UNIT * UNIT
            seen = (seen[0][:, first:], seen[1][:, first:])  # the chunk's windows reach no key before it
            options = _dense(start - first, static.window, query.shape[:2])
        else:
            assert static.block is not None and static.rule is not None and new is not None
            mask = select_chunk(
                query,
                seen[0],
                new,
                learned,
                counts,
                lengths,
                start=start,
                block=static.block,
                block_q=static.block_q,
                rule=static.rule,
                density_hint=static.density_hint,
                window=static.window,
                answers=answers,
            )
            options = {"mask": mask}
            if static.window is not None and static.window < end:
                options |= _dense(start, static.window, query.shape[:2])
        return static.attention_fn(query, *seen, **options), (k, v, new)

    return jax.tree.unflatten(static.tree, weights)(x, turned, attend)


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
