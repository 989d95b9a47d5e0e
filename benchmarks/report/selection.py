"""Tokens that choose their own blocks, and native sparse attention as a whole, beside other kernels."""

from __future__ import annotations

from benchmarks.report.words import Row, Run, facts, grid, median, ms, section, span, times
from xsake._ground.words import kernel
from xsake._race.course import DIRECTIONS

MENDED = "ejkernel, mended"  # it counts the rows of a launch by NumPy, and not by a traced operation
CAUSES = {  # what a failure's words begin with, and the words for it
    "it fails: ": "its launch fails in JAX",
    "it is wrong: ": "its results are wrong",
}


def gpu_selection() -> str:
    run = Run.load("gpu_selection")
    by = {(r["tokens"], r["group"]): r for r in run.results if r["choice"] == "scored"}
    columns = {
        (what, d): f"{words}, {d}"
        for what, words in (("selected", "chosen blocks"), ("whole", "whole operation"))
        for d in DIRECTIONS
    }

    def cell(at: tuple[int, int], column: tuple[str, str]) -> str:
        what, direction = column
        name = f"{what}, {direction}"
        if name not in by[at]["seconds"]:
            return ""
        return f"{ms(median(by[at], name))} ({times(over_dense(by[at], name), 1)})"

    return section(
        grid(("tokens", "heads per K/V head"), {at: [str(n) for n in at] for at in by}, columns, cell),
        facts(*_facts(run.results, by), *beside_peers(run.results)),
        run.source("jax", "jax-triton", "ejkernel"),
    )


def over_dense(row: Row, name: str) -> float:
    """How many times as fast as dense attention by cuDNN."""
    return median(row, f"dense cudnn, {name.split(', ')[1]}") / median(row, name)


def tflops(row: Row, direction: str, head_dim: int = 128) -> float:
    """Throughput on chosen blocks: two products forward, seven with the backward."""
    products = 2 if direction == "forward" else 7
    return (
        2
        * products
        * row["tokens"]
        * row["heads"]
        * row["keys"]
        * head_dim
        / median(row, f"selected, {direction}")
        / 1e12
    )


def _facts(rows: list[Row], by: dict[tuple[int, int], Row]) -> list[str]:
    longest = max(by)
    scored, uniform = (
        next(r for r in rows if (r["tokens"], r["group"], r["choice"]) == (*longest, choice))
        for choice in ("scored", "uniform")
    )
    slower = median(uniform, "selected, forward") / median(scored, "selected, forward")
    memory = " and ".join(f"{scored['memory'][f'selected, {d}'] / 2**20:.0f} MiB" for d in DIRECTIONS)
    rates = " and ".join(f"{tflops(scored, d):.0f} TFLOP/s {d}" for d in DIRECTIONS)
    return [
        f"At {longest[0]} tokens with {longest[1]} heads per K/V head the chosen blocks are computed at {rates}, with "
        f"{memory} of temporary memory.",
        f"{scored.get('list_tokens', 8)} neighbouring tokens share a list, which has {scored['union']:.1f} times as "
        "many blocks as one token chose. If every token chose at random, the list would have "
        f"{uniform['union']:.1f} times as many, and the forward would take {slower:.1f} times as long.",
        f"The error against XLA in float32 is at most {max(r['error'] for r in rows):.1e} of the output's norm.",
    ]


def beside_peers(rows: list[Row]) -> list[str]:
    """How many times as long other kernels take with the same blocks; a sentence per cause where they are not timed."""
    slower: dict[tuple[str, str], list[float]] = {}
    failed: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            who, direction = name.rsplit(", ", 1)
            if name in row["seconds"]:
                ratio = median(row, name) / median(row, f"selected, {direction}")
                slower.setdefault((who, direction), []).append(ratio)
            elif peer["words"]:
                cause = next((words for begin, words in CAUSES.items() if peer["words"].startswith(begin)), None)
                failed.setdefault(cause or peer["words"].replace("`", "'"), {})[f"{_who(who)}, {direction}"] = None
    said = [
        f"{_who(who)}, {d}: the time is {span(found, '{:.1f}x')} that of XSAKE's default kernels."
        for (who, d), found in slower.items()
    ]
    return said + [f"Not timed, since {cause}: {'; '.join(which)}." for cause, which in failed.items()]


def _who(name: str) -> str:
    return "ejkernel with a mended backward" if name == MENDED else kernel(name)
