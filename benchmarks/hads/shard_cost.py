"""What equal counts for the shards of a sequence cost: the divergence of SmolLM2 under `select(..., shards=8)`.

    python -m benchmarks.hads.shard_cost texts.npz       writes benchmarks/results/hads/shards-8192-64.json

`texts.npz` is that of `benchmarks.hads.texts`. Each text is read densely, under HADS, and under HADS with equal counts
for 8 shards, contiguous and in zigzag, at the same budgets and so with as many blocks in every layer. Recorded:

    kl                the mean divergence of the predictions from the dense model's, in nats per token
    busiest_shard     blocks of the busiest of 8 shards over the mean of the shards, for shards of each order;
                      the mean and the most over texts and layers
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record
from benchmarks.hads.read_text import read_text
from benchmarks.hads.union_density import BUDGETS, DOMAINS, FOLDER, ORDERS
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.mask.sequence_order import Order, shard_of_rows
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.cut import Cut
from xsake.hads.selection.program import Given, chosen
from xsake.hads.study.divergence import compare
from xsake.hads.study.layer import Blocks, Layer
from xsake.hads.study.layerwise import run
from xsake.hads.study.registry import Method, register
from xsake.hads.study.texts import load_texts
from xsake.model import load_pretrained

SHARDS = 8


def contiguous_8(x: Layer) -> Blocks:
    return _equal(x, "contiguous")


def zigzag_8(x: Layer) -> Blocks:
    return _equal(x, "zigzag")


def _equal(x: Layer, order: Order) -> Blocks:
    """`methods.hads` with equal counts."""
    weights = x.profile.estimator(x.number), x.profile.sensitivity[x.number], x.profile.burstiness[x.number]
    given = Given(x.query, x.key, *weights, {"count": jnp.asarray(x.count, jnp.int32)})
    return chosen(x.grid, x.query.shape[2], jax.tree.map(jnp.asarray, given), cut=Cut(SHARDS, order))


METHODS = {"hads": "all rows together", "hads_contiguous_8": "contiguous", "hads_zigzag_8": "zigzag"}
for _method in (contiguous_8, zigzag_8):
    register(f"hads_{_method.__name__}", Method(_method), group="shards")


def busiest(blocks: np.ndarray, order: Order) -> np.ndarray:
    """Of bool[layers, H, n, n], for each layer: blocks of the busiest shard over the mean of the shards."""
    per_row = blocks.sum((1, 3))
    shard = shard_of_rows(per_row.shape[1], SHARDS, order)
    per_shard = np.stack([per_row[:, shard == s].sum(1) for s in range(SHARDS)], 1)
    return per_shard.max(1) / per_shard.mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--profile", type=Path, default=FOLDER / "profile-8192-64.json")
    parser.add_argument("--per-domain", type=int, default=1, help="texts of each domain")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    profile = HadsProfile.load(args.profile)
    texts = load_texts([args.texts], length=profile.length, limit=args.per_domain, domains=DOMAINS)
    model = load_pretrained("smollm2", dtype=jnp.float32)
    layers = Layers(model)
    about = {
        "model": profile.model,
        "profile": args.profile.name,
        "block": profile.block,
        "dtype": "float32",
        "shards": SHARDS,
        "texts": [{"name": text.name, "digest": text.digest, "tokens": len(text.tokens)} for text in texts],
    }
    seen: dict[tuple[str, float], list[tuple[float, dict[Order, np.ndarray]]]] = {}
    for number, text in enumerate(texts):
        tokens = jnp.asarray(text.tokens[None], jnp.int32)
        dense, _ = run(layers, tokens)
        for budget in BUDGETS:
            for method in METHODS:
                states, blocks = read_text(layers, profile, text, method, budget)
                kl = float(np.asarray(compare(model, dense, states, tokens).divergence, np.float64).mean())
                seen.setdefault((method, budget), []).append((kl, {order: busiest(blocks, order) for order in ORDERS}))
                print(f"{text.name} {METHODS[method]:18} {budget:.0%}: KL {kl:.5f}", flush=True)
        done = dict(about, texts=about["texts"][: number + 1])
        path = record.save(f"shards-{profile.length}-{profile.block}", _lines(seen), args.out, settings=done)
    print(*_lines(seen), path, sep="\n")


def _lines(seen: dict[tuple[str, float], list[tuple[float, dict[Order, np.ndarray]]]]) -> list[dict[str, Any]]:
    lines = []
    for (method, budget), found in seen.items():
        kl = np.array([kl for kl, _ in found])
        together = np.array([kl for kl, _ in seen["hads", budget]])
        line: dict[str, Any] = {"equal_counts_for": METHODS[method], "budget": budget, "kl": kl.mean()}
        line |= {"kl_by_text": kl.tolist(), "kl_over_all_rows_together": float((kl / together).mean())}
        for order in ORDERS:
            ratios = np.stack([by_order[order] for _, by_order in found])
            line[f"busiest_shard_{order}"] = {
                "mean": round(float(ratios.mean()), 4),
                "most": round(float(ratios.max()), 4),
            }
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
