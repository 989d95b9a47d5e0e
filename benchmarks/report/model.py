"""Training runs, and the perplexity of a pretrained model."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report.words import Row, Run, facts, listing, ms, section, times
from xsake._ground.words import in_words, model

ATTENTION = {"cudnn": "dense (cuDNN)", "dense": "dense (XSAKE)"}


def train_gpu() -> str:
    """Whole runs, and the time of a step at longer lengths, beside dense attention."""
    run = Run.load("train_gpu")
    dense = {(r["preset"], r["length"]): r for r in run.results if r["kind"] == "dense"}

    def if_alone(words: Callable[[Row], str], otherwise: str = "") -> Callable[[Row], str]:
        return lambda r: otherwise if "beside" in r else words(r)

    def faster(r: Row) -> str:
        peer = dense.get((r["preset"], r["length"]), r)
        return "" if peer is r else times(peer["seconds"]["median"] / r["seconds"]["median"])

    columns = {
        "model": lambda r: model(r["preset"]),
        "tokens": "{length}",
        "attention": lambda r: ATTENTION.get(r["config"]["attention"]) or in_words(r["config"]["attention"]),
        "active blocks": "{density:.0%}",
        "step": if_alone(lambda r: ms(r["seconds"]["median"], 0), "not timed alone"),
        "over dense": if_alone(faster),
        "tokens/s": if_alone("{tokens_per_second:,.0f}".format_map),
        "MFU": if_alone(lambda r: "" if r["mfu"] is None else f"{r['mfu']:.0%}"),
        "held-out loss": lambda r: (
            f"{r['held_out_loss']:.3f} after {r['tokens'] / 1e6:.0f}M tokens" if "held_out_loss" in r else ""
        ),
    }
    rows = sorted(run.results, key=lambda r: (r["length"], r["preset"] != "small", r["kind"]))
    return section(listing(rows, columns), facts(*how_timed(run.results)), run.source("jax"))


def how_timed(rows: list[Row]) -> list[str]:
    """Which steps were raced: only their times have a number of rounds."""
    timed = [r for r in rows if "beside" not in r]
    raced, others = ([r for r in timed if ("rounds" in r["seconds"]) is is_raced] for is_raced in (True, False))
    said = [
        f"The {in_words(r['config']['attention'])} run of {r['length']} tokens ran beside {r['beside']}."
        for r in rows
        if "beside" in r
    ]
    if raced:
        hads = " HADS's steps choose their blocks; none of them recalibrates."
        said.append(
            f"Steps at {_lengths(raced)} tokens were raced: the kinds of attention took turns in random order, with "
            f"equal pauses.{hads if any(r['kind'] == 'hads' for r in raced) else ''}"
        )
    if others:
        said.append(f"Steps at {_lengths(others)} tokens were timed one kind of attention after the other.")
    return said


def _lengths(rows: list[Row]) -> str:
    return " and ".join(map(str, sorted({r["length"] for r in rows})))


def smollm2() -> str:
    run = Run.load("smollm2")
    r = run.results
    worst = max(window["sparse_difference"] for window in r["windows"])
    return (
        f"SmolLM2-135M, loaded this way, reads Python's own documentation with a perplexity of {r['perplexity']:.1f} "
        f"({len(r['windows'])} windows of {r['length']} tokens, {r['dtype']}). With a mask that lists every block, no "
        f"logit differs from dense attention's by more than {worst:.0e}. {run.source('jax')}"
    )
