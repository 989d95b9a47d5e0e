"""Tokens that follow a prompt: the prompt is read, sparsely if masks or HADS say so, then one forward per token."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake._ground.fields import check
from xsake._ground.kinds import whole
from xsake.hads import chunk_counts
from xsake.model.generation.hads_budget import HadsBudget
from xsake.model.generation.memory import check_memory, tell_beyond_calibration
from xsake.model.generation.prefill import Answers, Prompt, check_answers, check_reading, padded, read_prompts
from xsake.model.generation.sampling import Sampler
from xsake.model.generation.sparse_decode import StepRule
from xsake.model.generation.writer import Writer
from xsake.model.network.attend import MaskFn
from xsake.model.network.cache import KVCache
from xsake.model.network.config import ModelConfig
from xsake.model.network.sharding import check_generation, shard_model
from xsake.model.network.transformer import Transformer

_log = logging.getLogger("xsake")


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
    mask_fn: MaskFn | None = None,
    hads: HadsBudget | None = None,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    answers: Answers | None = None,
) -> list[list[int]]:
    """Continues prompts of any lengths; returns the new tokens of each prompt, up to and without a stop token.

    Args:
      model: the cache and the arithmetic have the model's `dtype`.
      prompts: token numbers; none may be empty.
      max_new_tokens: the longest prompt and its new tokens must fit the model's context.
      sampler: greedy by default.
      stop: tokens that end a sequence.
      seed: for a sampler that draws.
      mask_fn: masks for the prompt, as in `Transformer.hidden`; new tokens attend to all tokens before them.
      hads: read the prompt with HADS, and write with it if it has a budget for that, where its policy says so. Not
        together with `mask_fn`.
      chunk: read this many tokens of the prompt at a time, in multiples of the profile's rows (without HADS, of 64):
        the memory of a forward follows the chunk. Not together with `mask_fn`. Prompts that do not fit the device are
        refused before anything runs, with the chunk that would fit.
      mesh: of `xsake.model.sharding.make_mesh`: prompts are split over its axis "data", weights and cache over its axis
        "model". The tokens are those of one device. A model from `shard_model` is not copied anew.
      answers: for each prompt, the tokens where earlier answers of a conversation begin. HADS chooses the rows before
        them as closely as the prompt's last ones: a question stands there.

    Prompt and cache are padded to multiples of 64 tokens, which changes no result, so that prompts of other lengths
    rarely compile anew. With a `mask_fn` the prompt is not padded.

    >>> from flax import nnx
    >>> from xsake.model import PRESETS, Transformer, generate
    >>> model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> [len(new) for new in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
    [5, 5]
    """
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    options: dict[str, Any] = dict(sampler=sampler, seed=seed, mask_fn=mask_fn, hads=hads, chunk=chunk, mesh=mesh)
    options["answers"] = answers
    for tokens in stream(model, prompts, max_new_tokens=max_new_tokens, **options):
        for row, token in enumerate(tokens.tolist()):
            done[row] = done[row] or token in stop
            if not done[row]:
                new[row].append(token)
        if all(done):
            break
    return new


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    mask_fn: MaskFn | None = None,
    hads: HadsBudget | None = None,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    answers: Answers | None = None,
) -> Iterator[np.ndarray]:
    """`generate`, step by step: yields the next token of every sequence, i32[B]. No token stops it."""
    if mask_fn is not None and (hads is not None or chunk is not None):
        raise ValueError("mask_fn masks a prompt that is read in one piece: give it without hads and chunk")
    check_answers(prompts, answers, hads)
    if hads is not None:
        _check_prompts(model.config, prompts, max_new_tokens, seed)
        hads.check(model.config, max(map(len, prompts)) + (0 if hads.decode is None else max_new_tokens))
        decisions = hads.decisions([len(prompt) for prompt in prompts], chunk=chunk, dtype=model.dtype)
        for what, decision in decisions.items():
            _log.info("HADS, %s: %s", what, decision)
        hads = hads.as_decided(decisions)
        answers = None if hads.prompt is None else answers
    capacity, step = check_request(
        model.config, prompts, max_new_tokens=max_new_tokens, seed=seed, hads=hads, chunk=chunk
    )
    lengths, profile = [len(prompt) for prompt in prompts], None if hads is None else hads.profile
    if profile is not None:
        tell_beyond_calibration(profile, max(lengths))
    if mesh is None and mask_fn is None:
        itemsize = jnp.dtype(model.dtype).itemsize
        sizes: dict[str, Any] = dict(batch=len(lengths), length=max(lengths), capacity=capacity, chunk=chunk)
        check_memory(model.config, **sizes, itemsize=itemsize, profile=profile)
    if mesh is not None:
        check_generation(mesh, len(prompts))
        model = shard_model(model, mesh)
    keys = jax.random.split(jax.random.key(seed), max_new_tokens)
    sampler = sampler or Sampler()

    def steps() -> Iterator[np.ndarray]:
        if mask_fn is not None:
            yield from _with_masks(model, prompts, capacity, keys, sampler, mask_fn, mesh)
            return
        read = read_prompts(model, prompts, capacity=capacity, hads=hads, chunk=chunk, mesh=mesh, answers=answers)
        yield from write(model, read, keys, sampler, hads=hads, step=step)

    return _finite(steps())


def _finite(steps: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same steps. FloatingPointError at a token that the sampler could not take."""
    for number, tokens in enumerate(steps, 1):
        if (tokens < 0).any():
            raise FloatingPointError(
                f"the model's logits are not finite at new token {number}: its weights hold NaN or infinity, or are "
                f"too large for its dtype"
            )
        yield tokens


def check_request(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int = 0,
    hads: HadsBudget | None = None,
    chunk: int | None = None,
) -> tuple[int, StepRule | None]:
    """(the capacity of the cache, the rule of sparse writing) of `generate` with these arguments.

    ValueError if a model of this configuration cannot do it. The model's weights are not needed.
    """
    lengths = _check_prompts(config, prompts, max_new_tokens, seed)
    longest = max(lengths) + max_new_tokens
    capacity = min(-(-longest // 64) * 64, config.context)
    block = check_reading(config, prompts, capacity=capacity, hads=hads, chunk=chunk)
    if hads is None:
        return capacity, None
    if hads.prompt is not None:
        chunk_counts(hads.profile, hads.prompt, lengths, chunk or -(-max(lengths) // block) * block)
    if hads.decode is None:
        return capacity, None
    hads.check(config, longest)
    return capacity, StepRule.of(hads, shortest=min(lengths), capacity=capacity)


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> list[int]:
    """The prompts' lengths. ValueError if the model cannot continue the prompts by so many tokens."""
    lengths = [len(prompt) for prompt in prompts]
    if not prompts or min(lengths) == 0:
        raise ValueError("prompts must not be empty: a model continues at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    check("seed", seed, whole(0, 2**32 - 1))
    if max(lengths) + max_new_tokens > config.context:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and {max_new_tokens=} exceed the model's context of {config.context}"
        )
    if not all(0 <= token < config.vocab_size for prompt in prompts for token in prompt):
        raise ValueError(f"prompts must hold tokens from 0 to {config.vocab_size - 1}, the model's vocabulary")
    return lengths


def write(
    model: Transformer,
    read: Prompt,
    keys: Array | Sequence[Array],
    sampler: Sampler,
    *,
    hads: HadsBudget | None = None,
    step: StepRule | None = None,
) -> Iterator[np.ndarray]:
    """The tokens that follow prompts that are read, i32[B] per key; each attends to all tokens before it, or with a
    `step` to the blocks that HADS chooses.

    The cache of `read` is used up.
    """
    sparse: dict[str, Any] = {}
    if hads is not None and step is not None:
        sparse = dict(step=step, pooled=read.pooled, learned=hads.learned)
    writer = Writer(model, read.cache, sampler, **sparse)
    tokens = writer.first(read.last, keys[0])
    yield np.asarray(tokens)
    yield from writer.follow(tokens, keys[1:])


def _with_masks(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    keys: Array,
    sampler: Sampler,
    mask_fn: MaskFn,
    mesh: Mesh | None,
) -> Iterator[np.ndarray]:
    """The prompts are read in one piece, with the masks of `mask_fn`."""
    lengths: Any = np.array([len(prompt) for prompt in prompts], np.int32)
    rows: Any = padded(prompts, int(lengths.max()))
    if mesh is not None:
        rows, lengths = jax.device_put((rows, lengths), NamedSharding(mesh, PartitionSpec("data")))
    if jax.tree_util.all_leaves([mask_fn]):  # a plain function: make it an argument of jit
        mask_fn = jax.tree_util.Partial(mask_fn)
    weights, tree = jax.tree.flatten(model)
    tokens, cache = _prefill(tree, sampler, capacity, weights, rows, lengths, keys[0], mask_fn)
    yield np.asarray(tokens)
    yield from Writer(model, cache, sampler).follow(tokens, keys[1:])


@partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    tree: Any,
    sampler: Sampler,
    capacity: int,
    weights: list[Array],
    rows: Array,
    lengths: Array,
    key: Array,
    mask_fn: Any,
) -> tuple[Array, KVCache]:
    model: Transformer = jax.tree.unflatten(tree, weights)
    cache = KVCache.empty(model.config, batch=len(rows), capacity=capacity, dtype=model.dtype)
    states, cache = model.hidden(rows, cache=cache, mask_fn=mask_fn)
    last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], 1)
    return sampler(model.logits(last)[:, 0], key), dataclasses.replace(cache, length=lengths)
