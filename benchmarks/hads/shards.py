"""HADS's masks over the shards of a sequence: what a shard needs, and what equal counts for the shards cost.

    python -m benchmarks.hads.shards texts.npz

`texts.npz` is that of `benchmarks.hads.texts`. SmolLM2 reads each text densely and under every method of `shard_cost`,
at three budgets. Writes `union-8192-64.json` with its picture (`union_density`) and `shards-8192-64.json`
(`shard_cost`) after every text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks import record
from benchmarks.hads import shard_cost, union_density
from benchmarks.hads.read_text import read_text
from benchmarks.hads.union_picture import draw
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.divergence import compare
from xsake.hads.study.layerwise import run
from xsake.hads.study.texts import load_texts
from xsake.model import load_pretrained

FOLDER = record.RESULTS / "hads"
BUDGETS = (0.43, 0.2, 0.1)
DOMAINS = ("pydocs", "code", "prose")


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
    layers, windows = Layers(model), list(union_density.windows(profile.block))
    about = {"model": profile.model, "profile": args.profile.name, "block": profile.block, "dtype": "float32"}
    about["rule"] = f"`sparse` is left out if HADS's mean of needed_of_allowed is above {union_density.MOST}"
    united: dict[float, list[np.ndarray]] = {budget: [] for budget in BUDGETS}
    seen: dict[tuple[str, float], list[shard_cost.Read]] = {}
    for number, text in enumerate(texts, 1):
        tokens = jnp.asarray(text.tokens[None], jnp.int32)
        dense, _ = run(layers, tokens)
        for budget in BUDGETS:
            for method, words in shard_cost.METHODS.items():
                states, blocks = read_text(layers, profile, text, method, budget)
                if method == "hads":
                    united[budget].append(union_density.by_kv_head(blocks, profile.kv_heads))
                kl = float(np.asarray(compare(model, dense, states, tokens).divergence, np.float64).mean())
                busiest = {order: shard_cost.busiest(blocks, order) for order in union_density.ORDERS}
                seen.setdefault((method, budget), []).append(shard_cost.Read(kl, busiest))
                print(f"{text.name} {words:18} {budget:.0%}: KL {kl:.5f}", flush=True)
        read = [{"name": text.name, "digest": text.digest, "tokens": len(text.tokens)} for text in texts[:number]]
        settings = about | {"texts": read}
        unions = list(windows)
        for budget, masks in united.items():
            name = {"mask": "hads", "tokens": profile.length, "density": budget}
            unions += union_density.rows(name, np.stack(masks))
        costs = shard_cost.lines(seen)
        which = f"{profile.length}-{profile.block}"
        path = record.save(f"union-{which}", unions, args.out, settings=settings)
        draw(unions, path.with_suffix(".png"), union_density.MOST)
        record.save(f"shards-{which}", costs, args.out, settings=settings)
    print(*map(union_density.describe, unions), *costs, sep="\n")


if __name__ == "__main__":
    main()
