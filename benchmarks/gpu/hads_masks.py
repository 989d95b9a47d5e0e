"""Masks as HADS chooses them: of eight layers of SmolLM2, which reads 8192 tokens of this project's pages.

    python -m benchmarks.gpu.hads_masks              compute and print
    python -m benchmarks.gpu.hads_masks --record     also write benchmarks/data/hads_masks.npz, for `gpu/peers.py`

Some minutes on a CPU, after `xsake model fetch smollm2`.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from benchmarks import record
from benchmarks.harness.masks import HADS, HADS_MASKS, coarse
from xsake._ground import atomic

BUDGETS = (0.43, 0.2, 0.1)
EVERY = 4  # layers: 8 of 30


def compute() -> dict[str, np.ndarray]:
    import jax.numpy as jnp  # who only loads the masks needs neither a model nor a tokenizer

    from benchmarks.explorer import MODEL, PAGES
    from benchmarks.hads.read_text import read_text
    from xsake.hads.calibration.layerwise import Layers
    from xsake.hads.profile.profile import HadsProfile
    from xsake.hads.study.texts import Text
    from xsake.model import load_pretrained, load_tokenizer, open_model

    weights = open_model(MODEL)
    pages = "\n\n".join((record.ROOT / page).read_text() for page in (*PAGES, "docs/many_devices.md", "docs/tuning.md"))
    tokens = np.asarray(load_tokenizer(weights).encode(pages)[: HADS.length], np.int32)
    if len(tokens) < HADS.length:
        raise SystemExit(f"the pages have {len(tokens)} tokens, and {HADS.length} are needed: name more pages")
    layers = Layers(load_pretrained(weights, dtype=jnp.float32, param_dtype=jnp.float32))
    profile, text, found = HadsProfile.shipped(MODEL), Text("pages", "documentation", tokens), {}
    for budget in BUDGETS:
        _, kept = read_text(layers, profile, text, "hads", budget)
        found[f"HADS {budget:.0%}"] = some = kept[::EVERY].reshape(-1, *kept.shape[2:])
        shares = [x[:, np.tri(x.shape[-1], dtype=bool)].mean() for x in (some, coarse(some))]
        print(f"HADS {budget:.0%}: {len(some)} heads, {shares[0]:.1%} of the blocks, {shares[1]:.1%} of those of 128")
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", action="store_true", help="write benchmarks/data/hads_masks.npz")
    args = options.parse_args()
    found = compute()
    if args.record:
        packed = {name: np.packbits(blocks, axis=-1) for name, blocks in found.items()}
        with atomic.replacing(HADS_MASKS) as stream:
            np.savez_compressed(stream, about=json.dumps(record.environment()), **packed)


if __name__ == "__main__":
    main()
