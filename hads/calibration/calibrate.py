"""Calibration: learn a model's heads from a few sequences of dense attention.

Layers are learned one after the other, so that memory does not grow with layers times sequences, where the model can be
cut in layers (`Layered`). A whole function is run for as many layers as have `whole.AT_ONCE` bytes of observations, and
its backward pass keeps what crosses a call of attention, and all logits.

With N sequences of T tokens, n = T / block (with tall rows fewer), L layers, H query heads of D dimensions, and
activations of `width` 2-byte numbers:

    on the device, beside the weights
      4 H n (3 n + 5 D) N           one layer's statistics and pooled vectors, of all sequences
      2 T (4 width + 6 mlp_width)   about: one block's forward and backward, of one sequence
      4 H T block_q rows            logits of a few rows of blocks, some copies of them; a gigabyte on an accelerator
    on the host
      2 H n² N L                    gains of the blocks that compete, the lower triangle in 4 bytes
      2 T width (N + L)             the sequences' states, and one sequence's states before every layer; on the device
                                    where they are at most an eighth of its memory

Qwen2.5-Coder-1.5B (L = 28, H = 12, D = 128, width 1536) at T = 32768 and N = 8 in blocks of 64: the statistics of a
layer are 0.4 GB, where those of all layers would be 12 GB; the host holds 5 GB. `calibration.memory` asks the compiler.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.calibration.by_layer import ByLayer
from xsake.hads.calibration.fit import STEPS, fit_estimator
from xsake.hads.calibration.layerwise import Layered
from xsake.hads.calibration.observe import Observation
from xsake.hads.calibration.steps import Steps
from xsake.hads.calibration.tables import tabulate
from xsake.hads.calibration.whole import Watched, Whole
from xsake.hads.profile.budgets import uniform_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator
from xsake.hads.profile.fingerprint import digest, fingerprint
from xsake.hads.profile.profile import FREE_SHARES, HadsProfile
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.choice import choose
from xsake.hads.selection.gain import sorted_gains
from xsake.hads.selection.rows import Rows

Progress = Callable[[str, int, int], None]
_choose = jax.jit(lambda mass, grid, **rule: choose(mass, Rows(grid), **rule), static_argnames="grid")


def calibrate(
    apply: Any,
    tokens: Int[Array | np.ndarray, "N T"],
    *,
    name: str,
    block: int = 64,
    block_q: int | None = None,
    sensitivity_sequences: int = 4,
    steps: int = STEPS,
    seed: int = 0,
    rule: Rule | None = None,
    progress: Progress | None = None,
    steps_folder: str | os.PathLike | None = None,
    layers: int | None = None,
) -> HadsProfile:
    """Learn what `select` needs to know of a model's heads.

    Where some layers have a window and others none, HADS learns the others and leaves those alone.

    Runs the model densely over N sequences, layer by layer, and fits each layer's estimator of block mass; then runs it
    backwards over the first `sensitivity_sequences`. Use text like that which the model will read; 8 to 16 sequences
    suffice. The memory that it needs is told at the head of this module.

    Args:
      apply: your forward, `apply(attention, tokens) -> logits`, for tokens [1, T] and logits [1, T, vocab]. In every
        layer it calls `attention(query, key, value, layer=number)`, rotary positions applied, with is_causal,
        local_window_size and scale as in `xsake.attention`. It may be of any library, jitted, checkpointed, mapped or a
        scan over layers. Or an `xsake.model.Transformer`, or a `Layered`: a forward in layers, which takes less memory.
      tokens: N sequences of T tokens. The longer, the more distances are known.
      name: what the profile calls the model.
      block: tokens of a block of keys of the masks to come.
      block_q: tokens of a row of blocks, a multiple of `block`; by default `block`.
      sensitivity_sequences: how many sequences the backward pass sees.
      steps: steps of the fit.
      seed: seed of the sampled likelihood.
      rule: the constants of the choice, kept in the profile; by default those for such blocks (`Rule.of_blocks`).
      progress: called as progress(what, done, of).
      steps_folder: finished steps are kept here (a step is a layer, or a sequence of the backward pass), and the same
        call goes on after them, to the same profile. It holds all gains, and the sequences' states; delete it when the
        profile is saved.
      layers: how many layers there are, where `apply` scans over them: a traced number cannot say.
    """
    count, length = tokens.shape
    if count < 1 or sensitivity_sequences < 1:
        raise ValueError(f"calibration needs at least one sequence; got {count} and {sensitivity_sequences=}")
    watched = _watched(apply, length, layers)
    grid = CausalGrid.of(length, block, block_q, watched.window)
    if rule is not None:
        grid = dataclasses.replace(grid, rule=rule)
    grid.check_choice("sequences")
    report = progress or (lambda what, done, of: None)

    back = min(sensitivity_sequences, count)
    settings = {
        **grid.shape,
        "back": back,
        "steps": steps,
        "seed": seed,
        "rule": dataclasses.asdict(grid.rule),
    }
    texts = [digest(sequence) for sequence in np.asarray(tokens)]
    weights = None if steps_folder is None else watched.checksums()
    kept = Steps(steps_folder, {"name": name, "texts": texts, "weights": weights} | settings)
    learned = list(_learn_layers(watched, tokens, grid, kept, back=back, steps=steps, report=report))
    sensitivity = _for_large_errors(
        _sensitivity(watched, tokens[:back], [layer.kept for layer in learned], grid, kept, seed, report), grid.rule
    )
    tables = tabulate(
        np.stack([layer.gains[n] * omega[:, None] for layer, omega in zip(learned, sensitivity, strict=True)])
        for n in range(count)
    )
    profile = HadsProfile(
        **{name: np.stack([getattr(layer.estimator, name) for layer in learned]) for name in Estimator._fields},
        **tables._asdict(),
        sensitivity=sensitivity,
        burstiness=np.stack([layer.burstiness for layer in learned]),
        free_shares=FREE_SHARES,
        model=name,
        block=block,
        block_q=grid.block_q,
        length=length,
        kv_heads=learned[0].kv_heads,
        digests=tuple(fingerprint(sequence) for sequence in np.asarray(tokens)),
        rule=grid.rule,
        window=watched.window,
        windowed=watched.windowed,
    )
    profile.check()
    return profile


class _Learned(NamedTuple):
    """One layer's results, on the host."""

    estimator: Estimator
    burstiness: Float[np.ndarray, "H"]
    kept: list[np.ndarray]  # for each sequence of the backward pass, the bits of `_packed`
    gains: list[np.ndarray]  # for each sequence, f32[H, free blocks], as if all heads were equally sensitive
    kv_heads: int

    def to_arrays(self) -> dict[str, Any]:
        listed = {f"{name}.{n}": x for name in ("kept", "gains") for n, x in enumerate(getattr(self, name))}
        return self.estimator._asdict() | listed | {"burstiness": self.burstiness, "kv_heads": self.kv_heads}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> _Learned:
        estimator = Estimator(*(arrays[name] for name in Estimator._fields))
        kept, gains = (
            [arrays[f"{n}.{i}"] for i in range(len(arrays)) if f"{n}.{i}" in arrays] for n in ("kept", "gains")
        )
        return cls(estimator, arrays["burstiness"], kept, gains, int(arrays["kv_heads"]))


def _watched(apply: Any, length: int, layers: int | None) -> Watched:
    if isinstance(apply, Layered) or hasattr(apply, "layered"):
        return ByLayer(apply, length)
    if isinstance(apply, Watched):
        return apply
    return Whole(apply, length, layers)


def _learn_layers(
    watched: Watched,
    tokens: Array | np.ndarray,
    grid: CausalGrid,
    kept: Steps,
    *,
    back: int,
    steps: int,
    report: Progress,
) -> Iterator[_Learned]:
    """Learn each layer from all sequences; no layer's statistics outlive it."""
    first = 0
    while first < watched.number and (done := kept.get(f"layer-{first}")) is not None:
        report("heads of each layer", first, watched.number)
        first += 1
        yield _Learned.of_arrays(done)
    observed = watched.observe(tokens, grid, kept, first)
    for number in range(first, watched.number):
        report("heads of each layer", number, watched.number)
        learned = _learn(next(observed), grid, back, steps)
        kept.put(f"layer-{number}", learned.to_arrays())
        yield learned
    next(observed, None)
    report("heads of each layer", watched.number, watched.number)


def _learn(seen: list[Observation], grid: CausalGrid, back: int, steps: int) -> _Learned:
    variance = _variance(seen, grid)
    burstiness = np.float32(grid.rule.own_part) * variance
    heads = len(variance)
    equal = np.ones(heads, np.float32)
    budget = min(max(grid.rule.reference_budget, 1.5 * grid.forced_blocks / grid.blocks), 1.0)
    wanted = int(uniform_counts(1, heads, budget, grid)[0])
    kept = [
        _packed(_choose(one.statistics.mass, grid, sensitivity=equal, burstiness=variance, count=wanted))
        for one in seen[:back]
    ]
    pooled = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(one.pooled for one in seen))
    share = jnp.concatenate([one.statistics.share for one in seen])
    estimator, _ = fit_estimator(pooled, share, grid, steps=steps)
    gains = [_free(np.asarray(_gains(one, estimator, equal, burstiness, grid))[0]) for one in seen]
    return _Learned(estimator, burstiness, kept, gains, pooled.key.shape[1])


def _variance(seen: list[Observation], grid: CausalGrid) -> Float[np.ndarray, "H"]:
    """Variance of a block's mass among its queries, over the mass; over all blocks that are not forced."""
    sums = [_free_sums(one.statistics.mass, one.statistics.square, grid) for one in seen]
    variance, mass = np.sum([np.asarray(x, np.float64) for x in sums], 0)
    return (variance / np.maximum(mass, 1e-9)).astype(np.float32)


@partial(jax.jit, static_argnames="grid")
def _free_sums(mass: Array, square: Array, grid: CausalGrid) -> Float[Array, "two H"]:
    """Sums over the blocks that are not forced: of the variance of their mass among their queries, and of the mass."""
    free = jnp.asarray(grid.causal() & ~grid.forced())
    parts = jnp.stack([jnp.maximum(square - mass**2, 0), mass])
    return jnp.where(free, parts, 0).sum((1, -2, -1))


def _sensitivity(
    watched: Watched,
    tokens: Array | np.ndarray,
    kept: list[list[np.ndarray]],
    grid: CausalGrid,
    steps: Steps,
    seed: int,
    report: Progress,
) -> np.ndarray:
    """f64[L, H]: squared error per squared dropped mass, with the blocks that the rule keeps if all heads are alike."""
    sums = []
    for n in range(len(tokens)):
        report("sensitivity of heads", n, len(tokens))
        if (done := steps.get(f"sensitivity-{n}")) is not None:
            sums.append(done["sums"])
            continue
        row = jnp.asarray(tokens[n : n + 1], jnp.int32)
        kept_blocks = lambda layer, n=n: _unpacked(kept[layer][n], grid)  # noqa: E731
        sums.append(watched.costs(row, kept_blocks, grid, jax.random.key(seed + n)))
        steps.put(f"sensitivity-{n}", {"sums": sums[-1]})
    report("sensitivity of heads", len(tokens), len(tokens))
    errors, drops = np.sum(sums, 0).swapaxes(0, 1)
    ratio = errors / np.maximum(drops, 1e-12)
    # A head that drops next to nothing tells nothing; it must not come out as infinitely or not at all sensitive.
    typical = np.median(ratio)
    return np.clip(ratio, 1e-3 * typical, 1e3 * typical) if typical > 0 else np.ones_like(ratio)


def _for_large_errors(sensitivity: np.ndarray, rule: Rule) -> np.ndarray:
    """f32[L, H]: sensitivities eased by the rule's exponents, 1 on average."""
    of_layer = np.exp(np.log(sensitivity).mean(1, keepdims=True))
    eased = of_layer**rule.between_layers * (sensitivity / of_layer) ** rule.within_layers
    return (eased / eased.mean()).astype(np.float32)


@partial(jax.jit, static_argnames="grid")
def _gains(
    seen: Observation,
    estimator: Any,
    sensitivity: np.ndarray | Array,
    burstiness: np.ndarray | Array,
    grid: CausalGrid,
) -> Array:
    return sorted_gains(seen.mass(estimator, grid), Rows(grid), sensitivity, burstiness)[-1]


def _free(gains: Float[np.ndarray, "H rows n"]) -> Float[np.ndarray, "H free"]:
    """Without the blocks that are forced (infinite) or that causality forbids (negative): every head has as many."""
    return gains[np.isfinite(gains) & (gains >= 0)].reshape(len(gains), -1)


def _packed(kept: Bool[Array, "one H rows n"]) -> np.ndarray:
    return np.packbits(np.asarray(kept), axis=-1)


def _unpacked(bits: np.ndarray, grid: CausalGrid) -> Bool[Array, "one H rows n"]:
    return jnp.asarray(np.unpackbits(bits, axis=-1, count=grid.columns).astype(bool))
