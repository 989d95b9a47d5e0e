"""Training runs, and the perplexity of a pretrained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import record
from benchmarks.report.words import milliseconds, source, table

ATTENTION = {"cudnn": "dense (cuDNN)", "dense": "dense (XSAKE)"}  # other kinds are called what the trainer calls them


def train_gpu() -> str:
    """Whole runs, and the time of a step at longer lengths, beside dense attention."""
    run = record.load("train_gpu")
    heads = [
        "model",
        "tokens per sequence",
        "attention",
        "active blocks",
        "time per step",
        "over dense",
        "tokens/s",
        "MFU",
        "held-out loss",
    ]
    dense = {(r["preset"], r["length"]): r for r in run["results"] if r["kind"] == "dense"}
    rows = []
    for r in sorted(run["results"], key=lambda r: (r["length"], r["preset"] != "small", r["kind"])):
        alone, peer = "beside" not in r, dense.get((r["preset"], r["length"]))
        ratio = ""
        if alone and peer is not None and peer is not r:
            ratio = f"{peer['seconds']['median'] / r['seconds']['median']:.2f}x as fast"
        loss = f"{r['held_out_loss']:.3f} after {r['tokens'] / 1e6:.0f}M tokens" if "held_out_loss" in r else ""
        rows.append(
            [
                r["preset"],
                str(r["length"]),
                ATTENTION.get(r["config"]["attention"], r["config"]["attention"]),
                f"{r['density']:.0%}",
                milliseconds(r["seconds"]) if alone else "not timed alone",
                ratio,
                f"{r['tokens_per_second']:,.0f}" if alone else "",
                f"{r['mfu']:.0%}" if alone and r["mfu"] is not None else "",
                loss,
            ]
        )
    notes = [
        f"The {r['config']['attention']} run (commit {r['environment']['commit'][:7]}) ran beside {r['beside']}."
        for r in run["results"]
        if "beside" in r
    ]
    notes += [*_how_timed(run["results"]), *_earlier(run["results"])]
    origin = source("train_gpu.json", run, "jax")
    return "\n".join([*table(heads, rows), "", *notes, f"Times are medians with quartiles. {origin}"])


def _how_timed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Which steps were raced: only their times have a number of rounds."""
    timed = [r for r in rows if "beside" not in r]
    raced, others = ([r for r in timed if ("rounds" in r["seconds"]) is is_raced] for is_raced in (True, False))
    if raced:
        chooses = any(r["kind"] == "hads" for r in raced)
        hads = " HADS's steps choose their blocks; none of them recalibrates." if chooses else ""
        yield (
            f"Steps at {_lengths(raced)} tokens were raced: the kinds of attention took turns in random order, with "
            f"equal pauses.{hads}"
        )
    if others:
        yield f"Steps at {_lengths(others)} tokens were timed one kind of attention after the other."


def _earlier(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The commits of rows that an earlier run measured."""
    commits: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        if "environment" in r and "beside" not in r:
            commits.setdefault(r["environment"]["commit"][:7], []).append(r)
    for commit, found in commits.items():
        yield f"Of an earlier run, commit {commit}: the rows at {_lengths(found)} tokens."


def _lengths(rows: Iterable[dict[str, Any]]) -> str:
    return " and ".join(map(str, sorted({r["length"] for r in rows})))


def smollm2() -> str:
    run = record.load("smollm2")
    r = run["results"]
    worst = max(window["sparse_difference"] for window in r["windows"])
    return (
        f"SmolLM2-135M, loaded this way, reads Python's own documentation with a perplexity of {r['perplexity']:.1f} "
        f"({len(r['windows'])} windows of {r['length']} tokens, {r['dtype']}). With a mask that lists every block, no "
        f"logit differs from dense attention's by more than {worst:.0e}. {source('smollm2.json', run, 'jax')}"
    )
