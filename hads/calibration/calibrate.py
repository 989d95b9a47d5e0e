"""Calibration: learn a model's heads from a few sequences of dense attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from xsake.hads.calibration.fit import STEPS, fit_estimator
from xsake.hads.calibration.observe import Observation, observe, touch
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.tables import tabulate
from xsake.hads.profile.budgets import uniform_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.fingerprint import fingerprint
from xsake.hads.profile.profile import FREE_SHARES, HadsProfile
from xsake.hads.profile.rule import RULE, Rule
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import block_mass
from xsake.hads.selection.gain import sorted_gains
from xsake.hads.selection.pooled import Pooled

Progress = Callable[[str, int, int], None]
_choose = jax.jit(choose, static_argnames="grid")


def calibrate(
    model: Any,
    tokens: Int[Array | np.ndarray, "N T"],
    *,
    name: str,
    block: int = 64,
    sensitivity_sequences: int = 4,
    steps: int = STEPS,
    seed: int = 0,
    rule: Rule = RULE,
    progress: Progress | None = None,
) -> HadsProfile:
    """Learn what `select` needs to know of a model's heads.

    Runs the model densely over N sequences, one at a time, and backwards over the first `sensitivity_sequences`; then
    fits each layer's estimator of block mass. Use text like that which the model will read; 8 to 16 sequences suffice.

    Args:
      model: an `xsake.model.Transformer`, or a module like it (`calibration.observe` says what is used).
      tokens: N sequences of T tokens. The longer, the more distances are known.
      name: what the profile calls the model.
      block: block size of the masks to come.
      sensitivity_sequences: how many sequences the backward pass sees.
      steps: steps of the fit.
      seed: seed of the sampled likelihood.
      rule: the constants of the choice, kept in the profile.
      progress: called as progress(what, done, of).
    """
    count, length = tokens.shape
    grid = CausalGrid(length, block, rule)
    if count < 1 or sensitivity_sequences < 1:
        raise ValueError(f"calibration needs at least one sequence; got {count} and {sensitivity_sequences=}")
    grid.check_choice("sequences")
    report = progress or (lambda what, done, of: None)

    seen: list[list[Observation]] = []
    for n in range(count):
        report("dense attention", n, count)
        seen.append(jax.block_until_ready(observe(model, jnp.asarray(tokens[n : n + 1], jnp.int32), block)))
    layers = [_stack([sequence[layer] for sequence in seen]) for layer in range(len(seen[0]))]
    variance = np.stack([_variance(layer, grid) for layer in layers])
    burstiness = rule.own_part * variance

    back = min(sensitivity_sequences, count)
    sensitivity = _for_large_errors(_sensitivity(model, tokens[:back], seen, variance, grid, seed, report), rule)
    del seen

    estimators, gains = [], []
    for number, layer in enumerate(layers):
        report("fitting estimators", number, len(layers))
        estimator, _ = fit_estimator(layer.pooled, layer.statistics.share, grid, steps=steps)
        estimators.append(estimator)
        gains.append(np.asarray(_gains(layer.pooled, estimator, sensitivity[number], burstiness[number], grid)))
    by_sequence = [np.stack([gain[n] for gain in gains]) for n in range(count)]
    tables = tabulate(by_sequence, grid)
    report("fitting estimators", len(layers), len(layers))

    profile = HadsProfile(
        features=np.stack([e.features for e in estimators]),
        tokens=np.stack([e.tokens for e in estimators]),
        distance=np.stack([e.distance for e in estimators]),
        sink=np.stack([e.sink for e in estimators]),
        sensitivity=sensitivity,
        burstiness=burstiness,
        free_shares=FREE_SHARES,
        layer_shares=tables.layer_shares,
        head_shares=tables.head_shares,
        log_thresholds=tables.log_thresholds,
        model=name,
        block=block,
        length=length,
        kv_heads=layers[0].pooled.key.shape[1],
        digests=tuple(fingerprint(sequence) for sequence in np.asarray(tokens)),
        rule=rule,
    )
    profile.check()
    return profile


def _stack(observations: list[Observation]) -> Observation:
    """One layer's observations of all sequences as one batch."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *observations)


def _variance(layer: Observation, grid: CausalGrid) -> np.ndarray:
    """f32[H]: variance of a block's mass among its queries, over the mass; over all blocks that are not forced."""
    free = grid.causal() & ~grid.forced()
    mass = np.asarray(layer.statistics.mass)[..., free]
    variance = np.maximum(np.asarray(layer.statistics.square)[..., free] - mass**2, 0)
    return (variance.sum((0, -1)) / np.maximum(mass.sum((0, -1)), 1e-9)).astype(np.float32)


def _sensitivity(
    model: Any,
    tokens: Array | np.ndarray,
    seen: list[list[Observation]],
    variance: np.ndarray,
    grid: CausalGrid,
    seed: int,
    report: Progress,
) -> np.ndarray:
    """f64[L, H]: squared error per squared dropped mass, with the blocks that the rule keeps if all heads are alike."""
    layers, heads = variance.shape
    budget = min(max(grid.rule.reference_budget, 1.5 * grid.forced_blocks / grid.blocks), 1.0)
    wanted = int(uniform_counts(1, heads, budget, grid)[0])
    equal = np.ones(heads, np.float32)
    errors, drops = np.zeros((layers, heads)), np.zeros((layers, heads))
    for n in range(len(tokens)):
        report("sensitivity of heads", n, len(tokens))
        touched = touch(model, jnp.asarray(tokens[n : n + 1], jnp.int32), jax.random.key(seed + n))
        for number, layer in enumerate(touched):
            mass = seen[n][number].statistics.mass
            kept = _choose(mass, grid, sensitivity=equal, burstiness=variance[number], count=wanted)
            error, dropped = cost_of_dropping(layer, kept, grid)
            errors[number] += np.asarray(error)
            drops[number] += np.asarray(dropped)
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
    pooled: Pooled, estimator: Any, sensitivity: np.ndarray | Array, burstiness: np.ndarray | Array, grid: CausalGrid
) -> Array:
    return sorted_gains(block_mass(pooled, estimator, grid), grid, sensitivity, burstiness)[-1]
