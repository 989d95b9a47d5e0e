"""Random profiles and inputs, and HADS in dense numpy, which the tests compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_model import TINY, build

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.profile.rule import Rule
from xsake.model import Transformer

KERNELS = (
    *("pool_queries", "pool_keys", "tokens", "block_logits", "exact_sums", "exact_masses"),
    *("sorted_gains", "cut_3", "reach", "kept", "lists"),
)
RULE = Rule(exact_queries=20)  # of few blocks two or three rows, as the default of long sequences


def random_profile(
    seed: int = 0,
    *,
    layers: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block: int = 16,
    block_q: int = 0,
) -> HadsProfile:
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((layers, q_heads, *shape))).astype(np.float32)

    free = np.array([0.05, 0.2, 0.5], np.float32)
    head_shares = np.sort(rng.random((3, layers, q_heads)), 0).astype(np.float32)
    return HadsProfile(
        features=normal(4, head_dim // 2),
        tokens=normal(),
        distance=normal(len(BUCKETS)),
        sink=normal(),
        sensitivity=np.exp(normal()),
        burstiness=np.abs(normal(scale=0.05)),
        free_shares=free,
        layer_shares=head_shares.mean(-1),
        head_shares=head_shares,
        log_thresholds=np.array([-2.0, -4.0, -6.0], np.float32),
        model="random",
        block=block,
        block_q=block_q or block,
        length=256,
        kv_heads=kv_heads,
        digests=("0123456789abcdef",),
        rule=RULE,
    )


ONE_LAYER = random_profile(layers=1, head_dim=TINY.head_dim)
PROMPTS = [np.random.default_rng(n).integers(512, size=length).tolist() for n, length in enumerate((150, 203))]


def random_inputs(seed: int, length: int, profile: HadsProfile, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((batch, length, heads, profile.head_dim) for heads in (profile.q_heads, profile.kv_heads))
    query, key = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return query, key


def tiny_model(**changes: Any) -> Transformer:
    """The preset `tiny` in float32, as it is initialised, with a configuration that is changed so."""
    config = dataclasses.replace(TINY, **changes)
    return Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


def one_layer(**changes: Any) -> Transformer:
    """A model of one layer for `ONE_LAYER`, with weights far from their initial values."""
    return build(config=dataclasses.replace(TINY, layers=1, **changes))


def used_slots(indices: Any, row_ptr: Any, num_full: Any) -> tuple[Any, Any, Any]:
    """Lists without the slots past the last entry, which hold anything."""
    used = np.arange(indices.shape[-1]) < np.asarray(row_ptr)[..., -1:]
    return np.where(used, indices, -1), row_ptr, num_full


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def dense_weights(query: np.ndarray, key: np.ndarray, window: int | None = None) -> np.ndarray:
    """Causal attention weights [B, H, T, T] in float64; with a window, of the tokens inside it."""
    q, k = query.astype(np.float64), np.repeat(key, query.shape[2] // key.shape[2], 2).astype(np.float64)
    logits = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return softmax(np.where(visible(q.shape[1], window), logits, -np.inf))


def visible(length: int, window: int | None = None) -> np.ndarray:
    """bool[T, T]: the query sees the key."""
    back = np.arange(length)[:, None] - np.arange(length)
    return (back >= 0) & (back < (length if window is None else window))


def dense_mass(
    query: np.ndarray, key: np.ndarray, profile: HadsProfile, layer: int, answers: tuple[int, ...] = ()
) -> np.ndarray:
    """The masses that HADS chooses by, in float64: estimated feature by feature, with a loop over heads and pairs of
    blocks, and measured in the rows of the last queries and of those before `answers`."""
    rows, starts = (range(0, query.shape[1], size) for size in (profile.block_q, profile.block))
    d = query.shape[-1]
    group = query.shape[2] // key.shape[2]
    logits = np.full((query.shape[0], query.shape[2], len(rows), len(starts)), -np.inf)
    for b, h, i, j in np.ndindex(*logits.shape):
        back = (rows[i] + profile.block_q) // profile.block - 1 - j  # from the row's last block
        if back < 0:
            continue
        q = query[b, rows[i] : rows[i] + profile.block_q, h].astype(np.float64)
        k = key[b, starts[j] : starts[j] + profile.block, h // group].astype(np.float64)
        qm, km = q.mean(0), k.mean(0)
        features = (
            qm * km / np.sqrt(d),
            0.5 * (qm**2 + q.var(0)) * k.var(0) / d,
            0.5 * q.var(0) * km**2 / d,
            (np.maximum(qm, 0) * k.max(0) - np.maximum(-qm, 0) * k.min(0)) / np.sqrt(d),
        )
        weights = profile.features[layer, h].astype(np.float64)
        logits[b, h, i, j] = sum(w @ (f[: d // 2] + f[d // 2 :]) for w, f in zip(weights, features, strict=True))
        logits[b, h, i, j] += profile.tokens[layer, h] * np.log(np.exp(k @ qm / np.sqrt(d)).mean())
        bucket = max(n for n, start in enumerate(BUCKETS) if start <= back)
        logits[b, h, i, j] += profile.distance[layer, h, bucket] + (profile.sink[layer, h] if j == 0 else 0)
    mass, weights = softmax(logits), dense_weights(query, key)
    ends = [(max(end - profile.rule.exact_queries, 0), end) for end in (query.shape[1], *answers)]
    for i in {at // profile.block_q for first, end in ends for at in range(first, end)}:
        of_row = weights[:, :, rows[i] : rows[i] + profile.block_q]
        by_block = np.stack([of_row[..., at : at + profile.block].sum(-1) for at in starts], -1)
        root = np.sqrt((by_block**2).mean(2))
        mass[:, :, i] = root / root.sum(-1, keepdims=True)
    return mass


def forced_blocks(n: int) -> np.ndarray:
    forced = np.zeros((n, n), bool)
    for i, j in np.ndindex(n, n):
        forced[i, j] = j <= i and (j == 0 or j >= i - 1 or i < 4)
    return forced


def loss(mass: np.ndarray, kept: np.ndarray, sensitivity: np.ndarray, burstiness: np.ndarray) -> float:
    """Sum of ω (δ² + φ δ) over rows and heads [H, n, n], the last two rows four times: HADS minimises it."""
    dropped = (mass * ~kept).sum(-1)
    dropped_cost = sensitivity[:, None] * (dropped**2 + burstiness[:, None] * dropped)
    return float(dropped_cost.sum() + 3 * dropped_cost[:, -2:].sum())


def check_scores(
    got: np.ndarray, value: Callable[..., float], query: np.ndarray, key: np.ndarray, grid: CausalGrid, rtol: float
) -> None:
    """Compare block scores [B, H, n, n] of two heads with `value(q, k, i, j)`; q and k are lists of a head's blocks."""
    got, group = np.asarray(got), query.shape[2] // key.shape[2]
    assert (np.isneginf(got) | (got == 0))[..., ~grid.causal()].all()
    for b, h in ((0, 0), (1, 3)):
        q, k = blocks_of(query, b, h, grid), blocks_of(key, b, h // group, grid)
        for i in range(grid.rows):
            wanted = [value(q, k, i, j) for j in range(i + 1)]
            np.testing.assert_allclose(got[b, h, i, : i + 1], wanted, rtol=rtol, atol=1e-5)


def blocks_of(x: np.ndarray, b: int, h: int, grid: CausalGrid) -> list[np.ndarray]:
    return [x[b, at : at + grid.block, h].astype(np.float64) for at in range(0, grid.length, grid.block)]
