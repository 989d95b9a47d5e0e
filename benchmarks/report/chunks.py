"""Reading a prompt in chunks beside reading it in one piece, from runs of `python -m benchmarks.hads.chunk_quality`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.report.hads import FOLDER, MODELS
from benchmarks.report.words import source, table

MOST = 1.05  # the aim: KL in chunks over KL in one piece


def chunks() -> str:
    return "\n\n".join(_run(path.name, json.loads(path.read_text())) for path in sorted(FOLDER.glob("chunks-*.json")))


def _run(name: str, run: dict[str, Any]) -> str:
    about, rows, texts = run["environment"]["settings"], run["results"]["reading"], run["results"]["texts"]
    budgets, sizes = (list(dict.fromkeys(r[what] for r in rows)) for what in ("budget", "chunk"))
    by = {(r["budget"], r["chunk"]): r for r in rows}
    in_chunks = [r for r in rows if r["chunk"] is not None]
    missed = [f"chunks of {r['chunk']} at {r['budget']:.0%}" for r in in_chunks if r["of_one_piece"] > MOST]
    largest = max(in_chunks, key=lambda r: max(r["of_one_piece_per_text"]))
    over = sum(share > MOST for r in in_chunks for share in r["of_one_piece_per_text"])
    most = max(largest["of_one_piece_per_text"])
    pairs = sum(len(r["of_one_piece_per_text"]) for r in in_chunks)
    model = MODELS.get(about["model"], "SmolLM2-135M, ")
    return "\n".join(
        [
            f"{model}{about['length']} tokens, {len(texts)} texts, {about['dtype']}: KL from dense attention in nats "
            "per token, in brackets over that of reading in one piece:",
            "",
            *table(
                ["read in", *(f"{b:.0%}" for b in budgets)],
                [[_how(size), *(_cell(by[b, size]) for b in budgets)] for size in sizes],
            ),
            "",
            f"- The aim is a KL at most {MOST - 1:.0%} above that of one piece, in the mean over texts: "
            + (f"missed by {', '.join(missed)}." if missed else "met at every budget."),
            f"- Of single texts, {over} of {pairs} are above it; the most is {most:.2f}, "
            f"in chunks of {largest['chunk']} at {largest['budget']:.0%}.",
            "",
            source(f"hads/{name}", run, "jax"),
        ]
    )


def _how(size: int | None) -> str:
    return "one piece" if size is None else f"chunks of {size}"


def _cell(row: dict[str, Any]) -> str:
    share = "" if row["chunk"] is None else f" ({row['of_one_piece']:.2f})"
    return f"{row['kl']:.4f}{share}"
