"""The methods that come with xsake: HADS, a fixed pattern, block-level versions of published methods, and oracles.

These versions are ours: written from the papers' formulas, at HADS's block size. They are not the authors' code.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xsake.hads.calibration.block_statistics import BlockStatistics, block_statistics
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.profile.rule import VERSION_3
from xsake.hads.selection.choice import choose
from xsake.hads.selection.program import Given, chosen, share_by_group
from xsake.hads.study.methods import ranking, scores
from xsake.hads.study.methods.by_gain import choose_by_gain, count_of_each, estimated_mass, rule_of_heads
from xsake.hads.study.methods.layer import Blocks, Layer, Priority
from xsake.hads.study.methods.registry import GROUPS, METHODS, Method, register, register_rival

__all__ = ["GROUPS", "METHODS", "choose_by_gain", "estimated_mass", "expand"]


def hads(x: Layer) -> Blocks:
    """As `hads.select` chooses blocks, by kernels where there are kernels and no sequence is padded."""
    if x.lengths is not None:
        return choose_by_gain(x, estimated_mass(x))
    given = Given(x.query, x.key, *x.profile.weights(x.number), {"count": jnp.asarray(x.count, jnp.int32)})
    return chosen(x.grid, x.query.shape[2], jax.tree.map(jnp.asarray, given))


def hads_group(x: Layer) -> Blocks:
    """HADS with one mask per KV head. The count is rounded down to a multiple of the query heads per KV head."""
    omega, phi = rule_of_heads(x)
    kv_heads = x.key.shape[2]
    group = x.query.shape[2] // kv_heads
    mass, omega, phi = share_by_group(estimated_mass(x), omega, phi, kv_heads)
    kept = choose(mass, x.rows, sensitivity=omega, burstiness=phi, count=count_of_each(x) // group)
    return jnp.repeat(kept, group, 1)


def without_exact_rows(profile: HadsProfile) -> HadsProfile:
    """The last two rows count more, as in older profiles, and are chosen by the estimate as all others."""
    alone = dataclasses.replace(VERSION_3, near_blocks=profile.rule.near_blocks, dense_rows=profile.rule.dense_rows)
    return dataclasses.replace(profile, rule=alone)


# -- rivals: each gives the priorities of a layer's blocks -------------------------------------------------------------


def sink_window(x: Layer) -> Priority:
    """StreamingLLM: the first block and the nearest blocks."""
    return x.everywhere(ranking.first_columns(x.grid, 1) - x.grid.distance())


def mean_top_k(x: Layer) -> Priority:
    """Mean-pooled queries and keys: the diagonal block and a constant number of blocks per row (MoBA; MInference's
    block-sparse heads)."""
    score = scores.mean_logits(x.query, x.key, x.grid)
    return ranking.constant_count(score) + x.everywhere(ranking.diagonal(x.grid))


def x_attention_8(x: Layer) -> Priority:
    """XAttention with stride 8: antidiagonal sums, a given share of them in every row; first and diagonal block on."""
    return _x_attention(x, 8)


def x_attention_16(x: Layer) -> Priority:
    """XAttention with stride 16."""
    return _x_attention(x, 16)


def _x_attention(x: Layer, stride: int) -> Priority:
    share = scores.antidiagonal_shares(x.query, x.key, x.grid, stride)
    return x.everywhere(ranking.first_and_diagonal(x.grid)) + ranking.constant_share(share)


def flash_prefill(x: Layer) -> Priority:
    """FlashPrefill: blocks whose score comes within a factor of the row's highest; first and diagonal block on."""
    peak = scores.strided_peaks(x.query, x.key, x.grid)
    return x.everywhere(ranking.first_and_diagonal(x.grid)) + ranking.near_peak(peak)


# -- oracles: each knows the true masses of the layer's own queries and keys -------------------------------------------


def oracle_top_k(x: Layer) -> Blocks:
    return x.keep(ranking.constant_count(_true_statistics(x).mass))


def oracle_top_p(x: Layer) -> Blocks:
    return x.keep(ranking.constant_share(_true_statistics(x).mass))


def oracle_gain(x: Layer) -> Blocks:
    """HADS's rule on true masses in place of estimated ones."""
    return choose_by_gain(x, _true_statistics(x).share)


def _true_statistics(x: Layer) -> BlockStatistics:
    return block_statistics(x.query, x.key, **x.grid.shape)


RIVALS = (sink_window, mean_top_k, x_attention_8, x_attention_16, flash_prefill)
GROUPS["short"] = ["hads", "sink_window+forced", "mean_top_k+forced", "x_attention_8+forced"]
register("hads", Method(hads), group="ours")
register("hads_no_exact_rows", Method(hads, adapt=without_exact_rows), group="ours")
register("hads_group", Method(hads_group), group="ours")
for _rival in RIVALS:
    register_rival(_rival.__name__, _rival)
register("oracle_top_k", Method(oracle_top_k, forced=False), group="oracles")
register("oracle_top_k+forced", Method(oracle_top_k), group="oracles")
register("oracle_top_p+forced", Method(oracle_top_p), group="oracles")
register("oracle_gain", Method(oracle_gain), group="oracles")


def expand(names: str) -> list[str]:
    """Methods from a comma-separated list of names and groups, each method once, in the order given.

    >>> expand("short,hads_group")
    ['hads', 'sink_window+forced', 'mean_top_k+forced', 'x_attention_8+forced', 'hads_group']
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = f"groups are {', '.join(GROUPS)}; methods are {', '.join(METHODS)}"
    if not wanted:
        raise ValueError(f"no method is named; {known}")
    if unknown := [name for name in wanted if name not in METHODS and name not in GROUPS]:
        raise ValueError(f"unknown {unknown}; {known}")
    return list(dict.fromkeys(method for name in wanted for method in GROUPS.get(name, [name])))
