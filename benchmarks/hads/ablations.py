"""HADS with one of its parts replaced: what each part is worth."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from benchmarks.hads.ranking import head_shares, scaled_count
from benchmarks.hads.scores import mean_shares
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.methods import ranking
from xsake.hads.study.methods.layer import Blocks, Layer, Priority
from xsake.hads.study.methods.registry import Method
from xsake.hads.study.methods.scores import antidiagonal_shares, mean_logits
from xsake.hads.study.methods.shipped import METHODS, choose_by_gain, estimated_mass


def rule_on_mean_pool(x: Layer) -> Blocks:
    """HADS's rule on the mean-pooled map in place of HADS's estimate."""
    return choose_by_gain(x, mean_shares(x.query, x.key, x.grid))


def rule_on_antidiagonals(x: Layer) -> Blocks:
    """HADS's rule on XAttention's score."""
    return choose_by_gain(x, antidiagonal_shares(x.query, x.key, x.grid, 8))


def estimate_top_k(x: Layer) -> Blocks:
    """HADS's estimate with a constant number of blocks per row in place of HADS's rule."""
    return x.keep(ranking.constant_count(estimated_mass(x)))


def estimate_top_p(x: Layer) -> Blocks:
    """HADS's estimate with a constant share of the mass per row."""
    return x.keep(ranking.constant_share(estimated_mass(x)))


def equal_heads(profile: HadsProfile) -> HadsProfile:
    """Every head is as sensitive as the others."""
    return dataclasses.replace(profile, sensitivity=jnp.ones_like(profile.sensitivity))


def no_burstiness(profile: HadsProfile) -> HadsProfile:
    return dataclasses.replace(profile, burstiness=jnp.zeros_like(profile.burstiness))


def hads_shares_top_k(x: Layer) -> Priority:
    """HADS's division among heads without its estimate and rule: a constant number of blocks per row by mean-pooled
    score, heads in the proportions that calibration found, diagonal block on. The idea of budgets per head from one
    offline pass is TCA-Attention's; the shares are HADS's own."""
    heads = jnp.maximum(head_shares(x), 0.01)
    score = scaled_count(mean_logits(x.query, x.key, x.grid), heads)
    return score + x.everywhere(ranking.diagonal(x.grid))


BY_PRIORITY = (hads_shares_top_k,)
_hads = METHODS["hads"].program
ABLATIONS = {
    "hads_equal_heads": Method(_hads, adapt=equal_heads),
    "hads_no_burstiness": Method(_hads, adapt=no_burstiness),
    "hads_rule_mean_pool": Method(rule_on_mean_pool),
    "hads_rule_antidiagonal": Method(rule_on_antidiagonals),
    "hads_estimate_top_k": Method(estimate_top_k),
    "hads_estimate_top_p": Method(estimate_top_p),
}
