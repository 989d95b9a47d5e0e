"""Every way to choose blocks that an evaluation compares, as mask functions of a model's forward."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.hads.block_mask import BlockMask
from xsake.hads.block_statistics import block_statistics
from xsake.hads.choose import choose
from xsake.hads.estimate import block_mass
from xsake.hads.keep import keep_largest
from xsake.hads.pooled import pool
from xsake.hads.profile import HadsProfile
from xsake.hads.selection import check_inputs, share_by_group
from xsake.hads.study import ranking, scores
from xsake.hads.study.baselines import PRIORITIES, Layer


@partial(jax.tree_util.register_dataclass, data_fields=("profile", "counts"), meta_fields=("name", "transpose"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodMask:
    """A mask function for `Transformer(..., mask_fn=...)`: a method of `METHODS` with `counts[layer]` blocks a layer.

    A pytree: new counts, from `hads.layer_counts`, and a new profile do not recompile. They count query heads' blocks.
    """

    name: str
    profile: HadsProfile
    counts: Any
    transpose: bool = False

    def __call__(self, layer: Any, query: Array, key: Array) -> BlockMask:
        grid = check_inputs(query, key, self.profile, layer)
        query, key = jax.lax.stop_gradient((query, key))
        count = jnp.asarray(self.counts, jnp.int32)[layer]
        blocks = METHODS[self.name](Layer(query, key, grid, layer, count, self.profile))
        return BlockMask.from_blocks(
            blocks,
            block_q=grid.block,
            block_kv=grid.block,
            q_len=grid.length,
            kv_len=grid.length,
            is_causal=True,
            transpose=self.transpose,
        )


def _published(x: Layer, name: str) -> Array:
    return keep_largest(PRIORITIES[name](x), x.grid, x.count)


def _strengthened(x: Layer, name: str) -> Array:
    """A published method with HADS's forced set."""
    return keep_largest(PRIORITIES[name](x), x.grid, x.count, x.grid.forced())


def _estimated(x: Layer) -> Array:
    return block_mass(pool(x.query, x.key, x.grid), x.profile.estimator(x.number), x.grid)


def _true(x: Layer) -> Array:
    return block_statistics(x.query, x.key, block=x.grid.block).mass


def _by_gain(x: Layer, mass: Array, *, sensitivity: bool = True, burstiness: bool = True) -> Array:
    omega, phi = (jnp.asarray(a)[x.number] for a in (x.profile.sensitivity, x.profile.burstiness))
    return choose(
        mass,
        x.grid,
        sensitivity=omega if sensitivity else jnp.ones_like(omega),
        burstiness=phi if burstiness else jnp.zeros_like(phi),
        count=x.count,
    )


def _group(x: Layer) -> Array:
    """One mask a KV head, in whole groups of blocks: the count is rounded down to a multiple of the group."""
    omega, phi = (jnp.asarray(a)[x.number] for a in (x.profile.sensitivity, x.profile.burstiness))
    groups = x.key.shape[2]
    mass, omega, phi = share_by_group(_estimated(x), omega, phi, groups)
    kept = choose(mass, x.grid, sensitivity=omega, burstiness=phi, count=x.count // (x.query.shape[2] // groups))
    return jnp.repeat(kept, x.query.shape[2] // groups, 1)


def _ranked(x: Layer, priority: Array) -> Array:
    return keep_largest(priority, x.grid, x.count, x.grid.forced())


OURS = {
    "hads": lambda x: _by_gain(x, _estimated(x)),
    "hads_group": _group,
}
ABLATIONS = {
    "hads_equal_heads": lambda x: _by_gain(x, _estimated(x), sensitivity=False),
    "hads_no_burstiness": lambda x: _by_gain(x, _estimated(x), burstiness=False),
    "hads_rule_mean_pool": lambda x: _by_gain(x, ranking.softmax(scores.mean_logits(x.query, x.key, x.grid))),
    "hads_rule_antidiagonal": lambda x: _by_gain(x, scores.antidiagonal_shares(x.query, x.key, x.grid, 8)),
    "hads_estimate_top_k": lambda x: _ranked(x, ranking.constant_count(_estimated(x))),
    "hads_estimate_top_p": lambda x: _ranked(x, ranking.constant_share(_estimated(x))),
}
# These know the true masses of the layer's own queries and keys.
ORACLES = {
    "oracle_top_k": lambda x: keep_largest(ranking.constant_count(_true(x)), x.grid, x.count),
    "oracle_top_k+forced": lambda x: _ranked(x, ranking.constant_count(_true(x))),
    "oracle_top_p+forced": lambda x: _ranked(x, ranking.constant_share(_true(x))),
    "oracle_gain": lambda x: _by_gain(x, _true(x)),
}
PUBLISHED = {name: partial(_published, name=name) for name in PRIORITIES}
STRENGTHENED = {f"{name}+forced": partial(_strengthened, name=name) for name in PRIORITIES}
METHODS: dict[str, Any] = OURS | ABLATIONS | ORACLES | PUBLISHED | STRENGTHENED
