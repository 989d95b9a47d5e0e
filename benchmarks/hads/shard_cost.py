"""What equal counts for the shards of a sequence cost: the divergence of SmolLM2 under `select(..., shards=8)`.

Each text is read densely, under HADS, and under HADS with equal counts for 8 shards, contiguous and in zigzag, at the
same budgets and so with as many blocks in every layer. `benchmarks.hads.shards` records for each:

    kl                the mean divergence of the predictions from the dense model's, in nats per token
    busiest_shard     blocks of the busiest of 8 shards over the mean of the shards, for shards of each order;
                      the mean and the most over texts and layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.union_density import ORDERS
from xsake.hads.mask.lists.order import OrderName, shard_of_rows
from xsake.hads.selection.cut import Cut
from xsake.hads.selection.given import Given
from xsake.hads.selection.program import chosen
from xsake.hads.study.methods.layer import Blocks, Layer
from xsake.hads.study.methods.registry import Method, register

SHARDS = 8


class Read(NamedTuple):
    """One text read under one method: the divergence, and `busiest` for shards of each order."""

    kl: float
    busiest: dict[OrderName, np.ndarray]


def contiguous_8(x: Layer) -> Blocks:
    return _equal(x, "contiguous")


def zigzag_8(x: Layer) -> Blocks:
    return _equal(x, "zigzag")


def _equal(x: Layer, order: OrderName) -> Blocks:
    """`methods.hads` with equal counts."""
    weights = x.profile.estimator(x.number), x.profile.sensitivity[x.number], x.profile.burstiness[x.number]
    given = Given(x.query, x.key, *weights, {"count": jnp.asarray(x.count, jnp.int32)})
    return chosen(x.grid, x.query.shape[2], jax.tree.map(jnp.asarray, given), cut=Cut(SHARDS, order))


METHODS = {"hads": "all rows together", "hads_contiguous_8": "contiguous", "hads_zigzag_8": "zigzag"}
for _method in (contiguous_8, zigzag_8):
    register(f"hads_{_method.__name__}", Method(_method), group="shards")


def busiest(blocks: np.ndarray, order: OrderName) -> np.ndarray:
    """Of bool[layers, H, n, n], for each layer: blocks of the busiest shard over the mean of the shards."""
    per_row = blocks.sum((1, 3))
    shard = shard_of_rows(per_row.shape[1], SHARDS, order)
    per_shard = np.stack([per_row[:, shard == s].sum(1) for s in range(SHARDS)], 1)
    return per_shard.max(1) / per_shard.mean(1)


def lines(seen: Mapping[tuple[str, float], Sequence[Read]]) -> list[dict[str, Any]]:
    """Lines of the record, from what was read by method and budget."""
    found = []
    for (method, budget), of_texts in seen.items():
        kl = np.array([read.kl for read in of_texts])
        together = np.array([read.kl for read in seen["hads", budget]])
        line: dict[str, Any] = {"equal_counts_for": METHODS[method], "budget": budget, "kl": float(kl.mean())}
        line |= {"kl_by_text": kl.tolist(), "kl_over_all_rows_together": float((kl / together).mean())}
        for order in ORDERS:
            ratios = np.stack([read.busiest[order] for read in of_texts])
            spread = {"mean": round(float(ratios.mean()), 4), "most": round(float(ratios.max()), 4)}
            line[f"busiest_shard_{order}"] = spread
        found.append(line)
    return found
