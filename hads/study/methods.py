"""Every way to choose blocks that an evaluation compares, as mask functions of a model's forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from xsake.hads.calibration.block_statistics import BlockStatistics, block_statistics
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import block_mass
from xsake.hads.selection.keep import keep_largest
from xsake.hads.selection.pooled import pool
from xsake.hads.selection.program import Given, chosen, share_by_group
from xsake.hads.selection.select import check_inputs
from xsake.hads.study import ranking, scores
from xsake.hads.study.baselines import PRIORITIES, Layer

Blocks = Bool[Array, "B H n n"]


@dataclasses.dataclass(frozen=True)
class Method:
    """What chooses a layer's blocks: a program, which several methods share, and the data that tell them apart."""

    program: Callable[[Layer], Blocks]
    forced: bool = True  # HADS's forced set is kept
    equal_heads: bool = False  # every head as sensitive as the others
    steady: bool = False  # no head bursty

    def __call__(self, x: Layer) -> Blocks:
        return self.program(dataclasses.replace(x, profile=self.adapted(x.profile), with_forced=self.forced))

    def adapted(self, profile: HadsProfile) -> HadsProfile:
        if self.equal_heads:
            profile = dataclasses.replace(profile, sensitivity=jnp.ones_like(profile.sensitivity))
        if self.steady:
            profile = dataclasses.replace(profile, burstiness=jnp.zeros_like(profile.burstiness))
        return profile


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("profile", "counts", "with_forced"),
    meta_fields=("program", "transpose"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodMask:
    """A mask function for `Transformer(..., mask_fn=...)`: a method of `METHODS` with `counts[layer]` blocks a layer.

    A pytree: new counts, from `hads.layer_counts`, a new profile and the forced set do not recompile. They count query
    heads' blocks.
    """

    program: Callable[[Layer], Blocks]
    profile: HadsProfile
    counts: Any
    with_forced: Any
    transpose: bool = False

    @classmethod
    def of(cls, name: str, profile: HadsProfile, counts: Any, *, transpose: bool = False) -> MethodMask:
        method = METHODS[name]
        return cls(
            program=method.program,
            profile=method.adapted(profile),
            counts=jnp.asarray(counts, jnp.int32),
            with_forced=jnp.asarray(method.forced),
            transpose=transpose,
        )

    def blocks(self, layer: Any, query: Array, key: Array) -> Blocks:
        """The kept blocks, bool[B, H, n, n]."""
        grid = check_inputs(query, key, self.profile, layer)
        query, key = jax.lax.stop_gradient((query, key))
        return self.program(Layer(query, key, grid, layer, self.counts[layer], self.profile, self.with_forced))

    def __call__(self, layer: Any, query: Array, key: Array) -> BlockMask:
        return causal_mask(self.blocks(layer, query, key), self.profile.block, query.shape[1], self.transpose)


def causal_mask(blocks: Blocks, block: int, length: int, transpose: bool = False) -> BlockMask:
    return BlockMask.from_blocks(
        blocks, block_q=block, block_kv=block, q_len=length, kv_len=length, is_causal=True, transpose=transpose
    )


def _by_priority(x: Layer, name: str) -> Blocks:
    """A pattern's or a published method's blocks, with HADS's forced set where the layer asks for it."""
    return _ranked(x, PRIORITIES[name](x))


def _estimated(x: Layer) -> Array:
    return block_mass(pool(x.query, x.key, x.grid), x.profile.estimator(x.number), x.grid)


def _true_statistics(x: Layer) -> BlockStatistics:
    return block_statistics(x.query, x.key, block=x.grid.block)


def _true(x: Layer) -> Array:
    return _true_statistics(x).mass


def _by_gain(x: Layer, mass: Array) -> Blocks:
    omega, phi = (jnp.asarray(a)[x.number] for a in (x.profile.sensitivity, x.profile.burstiness))
    return choose(mass, x.grid, sensitivity=omega, burstiness=phi, count=x.count)


def _ranked(x: Layer, priority: Array) -> Blocks:
    return keep_largest(priority, x.grid, x.count, x.forced)


def _hads(x: Layer) -> Blocks:
    """As `hads.select` chooses them, by kernels where it has them."""
    weights = x.profile.estimator(x.number), x.profile.sensitivity[x.number], x.profile.burstiness[x.number]
    given = Given(x.query, x.key, *weights, {"count": jnp.asarray(x.count, jnp.int32)})
    return chosen(x.grid, x.query.shape[2], jax.tree.map(jnp.asarray, given))


def _group(x: Layer) -> Blocks:
    """One mask a KV head, in whole groups of blocks: the count is rounded down to a multiple of the group."""
    omega, phi = (jnp.asarray(a)[x.number] for a in (x.profile.sensitivity, x.profile.burstiness))
    groups = x.key.shape[2]
    mass, omega, phi = share_by_group(_estimated(x), omega, phi, groups)
    kept = choose(mass, x.grid, sensitivity=omega, burstiness=phi, count=x.count // (x.query.shape[2] // groups))
    return jnp.repeat(kept, x.query.shape[2] // groups, 1)


def _true_top_k(x: Layer) -> Blocks:
    return _ranked(x, ranking.constant_count(_true(x)))


_PRIORITY = {name: partial(_by_priority, name=name) for name in PRIORITIES}

OURS = {
    "hads": Method(_hads),
    "hads_group": Method(_group),
}
ABLATIONS = {
    "hads_equal_heads": Method(_hads, equal_heads=True),
    "hads_no_burstiness": Method(_hads, steady=True),
    "hads_rule_mean_pool": Method(lambda x: _by_gain(x, ranking.softmax(scores.mean_logits(x.query, x.key, x.grid)))),
    "hads_rule_antidiagonal": Method(lambda x: _by_gain(x, scores.antidiagonal_shares(x.query, x.key, x.grid, 8))),
    "hads_estimate_top_k": Method(lambda x: _ranked(x, ranking.constant_count(_estimated(x)))),
    "hads_estimate_top_p": Method(lambda x: _ranked(x, ranking.constant_share(_estimated(x)))),
}
# These know the true masses of the layer's own queries and keys.
ORACLES = {
    "oracle_top_k": Method(_true_top_k, forced=False),
    "oracle_top_k+forced": Method(_true_top_k),
    "oracle_top_p+forced": Method(lambda x: _ranked(x, ranking.constant_share(_true(x)))),
    "oracle_gain": Method(lambda x: _by_gain(x, _true_statistics(x).share)),
}
PUBLISHED = {name: Method(program, forced=False) for name, program in _PRIORITY.items()}
STRENGTHENED = {f"{name}+forced": Method(program) for name, program in _PRIORITY.items()}
METHODS: dict[str, Method] = OURS | ABLATIONS | ORACLES | PUBLISHED | STRENGTHENED
