"""Small recordings and replays, made from block masks and coded by hand as dashboard/API.md says."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

import xsake
from xsake import patterns

ENVIRONMENT = {"date": "2026-11-15T18:55:42+00:00", "commit": "a705604", "device": "test", "command": "tests/web"}
BLOCK = 64
HTML = "<b>bold</b><script>alert(1)</script>"


BUDGETS = [0.2, 0.5]
METHODS = {"hads": "HADS", "sink_window": "sink + window"}


def block_mask(method: str, budget: float, side: int, head: int) -> xsake.BlockMask:
    """The mask that the recording of `side` blocks holds for a method, a budget and a head, in all layers."""
    length, sizes = side * BLOCK, {"block_q": BLOCK, "block_kv": BLOCK}
    if method == "hads":
        return patterns.random(length, length, density=budget, seed=head, is_causal=True, **sizes)
    return patterns.sink_window(length, length, sink=BLOCK, window=int(length * budget / 2), is_causal=True, **sizes)


def masses(side: int, head: int) -> np.ndarray:
    """Attention that falls with the distance, slower in later heads; rows sum to one."""
    distance = np.subtract.outer(np.arange(side), np.arange(side))
    mass = np.tril(np.exp(-np.abs(distance) * 16 / side / (head + 1)))
    return mass / mass.sum(1, keepdims=True)


def code(values: np.ndarray) -> np.ndarray:
    """One byte per value from 0 to 1; see `decodeMass` in the pages."""
    exponent = np.log2(np.maximum(values, 2.0**-20))
    return np.where(exponent < -15.9, 0, np.round(255 + 16 * exponent)).astype(np.uint8)


def decode(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 0, 0.0, 2.0 ** ((codes.astype(float) - 255) / 16))


def base64_of(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def recording(name: str, side: int, layers: int = 2, heads: int = 2) -> dict[str, Any]:
    """The content of a recording's file."""
    triangle = np.tril_indices(side)
    kept = {
        method: {
            str(budget): [np.asarray(block_mask(method, budget, side, head).to_blocks())[0, 0] for head in range(heads)]
            for budget in BUDGETS
        }
        for method in METHODS
    }
    mass = [masses(side, head) for head in range(heads)]

    def per_head(value: Any) -> dict[str, dict[str, list[list[float]]]]:
        return {
            method: {
                budget: [[value(head, of[head]) for head in range(heads)]] * layers for budget, of in by_budget.items()
            }
            for method, by_budget in kept.items()
        }

    shares = per_head(lambda head, blocks: float(blocks[triangle].mean()))
    about = {
        "id": name,
        "title": f"A test of {side} blocks {HTML}",
        "model": "test",
        "length": side * BLOCK,
        "block": BLOCK,
        "side": side,
        "layers": layers,
        "heads": heads,
        "budgets": BUDGETS,
        "methods": list(METHODS),
        "text": {"name": "test", "domain": None},
        "environment": ENVIRONMENT,
        "method_titles": METHODS,
        "oracles": [],
        "blocks": [{"start": n * BLOCK, "end": (n + 1) * BLOCK, "text": f"block {n} {HTML}"} for n in range(side)],
        "loss": 2.5,
        "shares": shares,
        "kept_mass": per_head(lambda head, blocks: float((mass[head] * blocks).sum() / side)),
        "results": [
            {
                "method": method,
                "budget": budget,
                "density": float(np.mean(shares[method][str(budget)])),
                "kl": 0.0123456 * (n + 1) / budget,
                "loss": 2.6,
                "perplexity_gap": 0.0345678 * (n + 1),
                "same_token": 0.9567,
            }
            for n, method in enumerate(METHODS)
            for budget in BUDGETS
        ],
        "detail": None,
    }
    one = [
        {
            "head": head,
            "sensitivity": 1.0,
            "burstiness": 0.1,
            "mass": base64_of(code(mass[head][triangle])),
            "cost": base64_of(code(mass[head][triangle] ** 2)),
            "cost_scale": 0.5,
            "kept": {
                method: {budget: base64_of(np.packbits(of[head][triangle])) for budget, of in by_budget.items()}
                for method, by_budget in kept.items()
            },
        }
        for head in range(heads)
    ]
    return {"about": about, "layers": [{"layer": layer, "side": side, "heads": one} for layer in range(layers)]}


def replay(name: str, side: int = 16) -> dict[str, Any]:
    """The content of a replay's file: a dense and a sparse run of three checkpoints, two layers and two heads."""
    triangle, steps = np.tril_indices(side), [0, 50, 100]
    runs = [("dense", "dense", 1.0), ("hads", "HADS at 50%", 0.5)]

    def frame(run: str, step: int) -> dict[str, Any]:
        heads = []
        for layer in range(2):
            for head in range(2):
                blocks = np.asarray(block_mask("hads", 0.5, side, head + step).to_blocks())[0, 0][triangle]
                blocks = np.ones_like(blocks) if run == "dense" else blocks
                mass, mask = base64_of(code(masses(side, head)[triangle])), base64_of(np.packbits(blocks))
                heads.append({"layer": layer, "head": head, "share": float(blocks.mean()), "mass": mass, "kept": mask})
        return {"run": run, "step": step, "side": side, "density": 0.5, "heads": heads}

    def curve(offset: float, every: int) -> dict[str, Any]:
        at = list(range(every, 101, every))
        return {"step": at, "time": [0.1 * n for n in at], "value": [offset + 5 / (1 + n / 20) for n in at]}

    about = {
        "id": name,
        "title": f"A replay {HTML}",
        "environment": ENVIRONMENT,
        "runs": [{"id": run, "title": title, "attention": run, "density": density} for run, title, density in runs],
        "steps": 100,
        "checkpoints": steps,
        "length": side * BLOCK,
        "block": BLOCK,
        "side": side,
        "layers": 2,
        "heads": 2,
        "tokens_per_step": 1024,
        "text": [f"block {n} {HTML}" for n in range(side)],
        "series": {
            run: {"loss": curve(1 + n, 1), "held_out_loss": curve(2 + n, 50)} for n, (run, _, _) in enumerate(runs)
        },
        "densities": {},
        "frames": {
            run: [{"step": step, "name": f"api/replays/{name}/frames/{run}.{step}"} for step in steps]
            for run, _, _ in runs
        },
    }
    return {"about": about, "frames": {f"{run}.{step}": frame(run, step) for run, _, _ in runs for step in steps}}
