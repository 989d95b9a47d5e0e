"""HADS's masks over the shards of a sequence: what a shard needs, and what equal counts for the shards cost.

    python -m benchmarks.hads.shards texts.npz

`texts.npz` is that of `benchmarks.hads.texts`. SmolLM2 reads each text densely and under every method of `shard_cost`,
at three budgets. Writes `union-8192-64.json` with its picture (`union_density`) and `shards-8192-64.json`
(`shard_cost`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import record
from benchmarks.hads import shard_cost, union_density
from benchmarks.hads.read_text import read_text
from benchmarks.hads.union_picture import draw
from xsake import _atomic
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.divergence import compare
from xsake.hads.study.layerwise import run
from xsake.hads.study.texts import Text, load_texts
from xsake.model import load_pretrained

FOLDER = record.RESULTS / "hads"
BUDGETS = (0.43, 0.2, 0.1)
DOMAINS = ("pydocs", "code", "prose")


class Seen(NamedTuple):
    """One text read under one method at one budget."""

    kl: float
    rows: np.ndarray  # i32[layers, n]: blocks that the heads of each row keep
    needed: np.ndarray  # bool[layers, KV heads, n, n]: blocks that some query head of a KV head keeps


class Reader:
    """Reads texts under methods. What was read is kept in the folder `work`: a run that was stopped goes on."""

    def __init__(self, profile: HadsProfile, work: Path):
        self.profile, self.work = profile, work
        self.model = load_pretrained("smollm2", dtype=jnp.float32)
        self.layers = Layers(self.model)
        self._dense: tuple[str, Any] = ("", None)
        work.mkdir(parents=True, exist_ok=True)

    def read(self, text: Text, method: str, budget: float) -> Seen:
        path = self.work / f"{self.profile.length}-{self.profile.block}-{text.digest}-{method}-{budget}.npz"
        if not path.exists():
            kl, blocks = self._run(text, method, budget)
            needed = union_density.by_kv_head(blocks, self.profile.kv_heads)
            with _atomic.replacing(path) as file:
                np.savez_compressed(file, kl=kl, rows=blocks.sum((1, 3), dtype=np.int32), needed=needed)
        with np.load(path, allow_pickle=False) as found:
            return Seen(float(found["kl"]), found["rows"], found["needed"])

    def _run(self, text: Text, method: str, budget: float) -> tuple[float, np.ndarray]:
        tokens = jnp.asarray(text.tokens[None], jnp.int32)
        if self._dense[0] != text.digest:
            self._dense = text.digest, run(self.layers, tokens)[0]
        states, blocks = read_text(self.layers, self.profile, text, method, budget)
        compared = compare(self.model, self._dense[1], states, tokens)
        return float(np.asarray(compared.divergence, np.float64).mean()), blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--profile", type=Path, default=FOLDER / "profile-8192-64.json")
    parser.add_argument("--per-domain", type=int, default=1, help="texts of each domain")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, default=record.ROOT / "out" / "hads_shards", help="what was read already")
    args = parser.parse_args()
    profile = HadsProfile.load(args.profile)
    texts = load_texts([args.texts], length=profile.length, limit=args.per_domain, domains=DOMAINS)
    reader = Reader(profile, args.work)
    seen: dict[tuple[str, float], list[Seen]] = {}
    for text in texts:
        for budget in BUDGETS:
            for method, words in shard_cost.METHODS.items():
                seen.setdefault((method, budget), []).append(reader.read(text, method, budget))
                print(f"{text.name} {words:18} {budget:.0%}: KL {seen[method, budget][-1].kl:.5f}", flush=True)
    settings = {
        "model": profile.model,
        "profile": args.profile.name,
        "block": profile.block,
        "dtype": "float32",
        "texts": [{"name": text.name, "digest": text.digest, "tokens": len(text.tokens)} for text in texts],
        "rule": f"`sparse` is left out if HADS's mean of needed_of_allowed is above {union_density.MOST}",
    }
    unions = list(union_density.windows(profile.block))
    for budget in BUDGETS:
        name = {"mask": "hads", "tokens": profile.length, "density": budget}
        unions += union_density.rows(name, np.stack([one.needed for one in seen["hads", budget]]))
    costs = shard_cost.lines({key: [(one.kl, one.rows) for one in found] for key, found in seen.items()})
    which = f"{profile.length}-{profile.block}"
    path = record.save(f"union-{which}", unions, args.out, settings=settings)
    draw(unions, path.with_suffix(".png"), union_density.MOST)
    record.save(f"shards-{which}", costs, args.out, settings=settings)
    print(*map(union_density.describe, unions), *costs, sep="\n")


if __name__ == "__main__":
    main()
