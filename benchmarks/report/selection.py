"""Tokens that choose their own blocks, and native sparse attention as a whole, beside dense attention by cuDNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.gpu.selection import DIM
from benchmarks.report import selection_peers
from benchmarks.report.words import source, table

# At the longest sequence, with the most heads per K/V head:
AIMS = {"forward": 300, "forward+backward": 250}  # TFLOP/s of what is chosen
LONGEST_KERNELS = 5  # of the whole operation, that are named
WHOLE_AIMS = {"forward": 16, "forward+backward": 60}  # ms
OTHERS = ("jax-triton", "ejkernel")  # named where the record has them
NAMES = {"selected": "chosen blocks", "whole": "the whole operation"}
DIRECTIONS = ("forward", "forward+backward")

Row = dict[str, Any]


def gpu_selection() -> str:
    run = record.load("gpu_selection")
    rows = run["results"]
    heads = ["tokens", "heads per K/V head", "choice", "union", *DIRECTIONS]
    heads += ["temporary memory", *(f"cuDNN dense, {direction}" for direction in DIRECTIONS)]
    cells = []
    for r in rows:
        times = [f"{_ms(r, f'selected, {d}'):.2f} ms ({_tflops(r, d):.0f} TFLOP/s)" for d in DIRECTIONS]
        cells.append(
            [selection_peers.tokens(r), str(r["group"]), r["choice"], f"{r['union']:.1f}", *times]
            + [_memory(r, "selected")]
            + [_dense(r, d) for d in DIRECTIONS]
        )
    whole = [
        [
            selection_peers.tokens(r),
            *(f"{_ms(r, f'whole, {d}'):.2f} ms" for d in DIRECTIONS),
            *(f"{_ms(r, f'dense cudnn, {d}') / _ms(r, f'whole, {d}'):.1f}x" for d in DIRECTIONS),
            _memory(r, "whole"),
        ]
        for r in rows
        if f"whole, {DIRECTIONS[0]}" in r["seconds"]
    ]
    peers = selection_peers.lines(rows)
    whole_heads = ["tokens", *DIRECTIONS, *(f"over cuDNN dense, {d}" for d in DIRECTIONS), "temporary memory"]
    return "\n".join(
        [
            *table(heads, cells),
            "",
            *_facts(rows),
            "",
            "The whole operation, with compression, choice and a window of 512 tokens; 16 heads per K/V head:",
            "",
            *table(whole_heads, whole),
            "",
            *peers,
            *([""] if peers else []),
            source("gpu_selection.json", run, "jax", *(v for v in OTHERS if v in run["environment"]["versions"])),
        ]
    )


def _facts(rows: list[Row]) -> list[str]:
    longest = max(r["tokens"] for r in rows)
    scored, uniform = (
        next(r for r in rows if (r["tokens"], r["choice"]) == (longest, choice)) for choice in ("scored", "uniform")
    )
    longer = uniform["union"] / scored["union"]
    slower = _ms(uniform, "selected, forward") / _ms(scored, "selected, forward")
    lost = [
        f"{NAMES[what]} at {r['tokens']} tokens, {_heads(r)} per K/V head, {d}"
        for r in rows
        for what in ("selected", "whole")
        for d in DIRECTIONS
        if f"{what}, {d}" in r["seconds"]
        and f"dense cudnn, {d}" in r["seconds"]
        and _ms(r, f"{what}, {d}") > _ms(r, f"dense cudnn, {d}")
    ]
    return [
        *_aims(scored),
        f"- {scored.get('list_tokens', 8)} neighbouring tokens share a list, which has {scored['union']:.1f} times as "
        f"many blocks as one token chose; {64 // scored['group']} neighbours leave out a block that none of them "
        f"chose. With the uniform choice the lists are {longer:.1f} times as long, and the forward takes {slower:.1f} "
        "times as long.",
        *([f"- Slower than dense attention by cuDNN: {'; '.join(lost)}."] if lost else []),
        f"- The error against XLA in float32 is at most {max(r['error'] for r in rows):.1e} of the output's norm.",
        *_kernels(scored),
        *_busy(rows),
    ]


def _kernels(row: Row) -> Iterator[str]:
    """What the whole operation's forward is made of."""
    if (found := (row.get("kernels") or {}).get("whole, forward")) is None:
        return
    longest = sorted(found["kernels"].items(), key=lambda item: -item[1]["seconds"])[:LONGEST_KERNELS]
    said = ", ".join(f"`{name}` {k['seconds'] * 1e3:.1f} ms ({k['launches']})" for name, k in longest)
    yield (
        f"- A whole operation's forward at {row['tokens']} tokens is {found['busy'] * 1e3:.1f} ms of kernels. The "
        f"longest, with their launches, of which the first is the attention of the three branches: {said}."
    )


def _busy(rows: list[Row]) -> Iterator[str]:
    """Of rows that were measured while other programs ran on the GPU."""
    busy = [r for r in rows if r.get("busy")]
    what = f"dense cudnn, {DIRECTIONS[0]}"
    alone = {r["tokens"]: _ms(r, what) for r in rows if not r.get("busy") and what in r["seconds"]}
    slower = [_ms(r, what) / alone[r["tokens"]] for r in busy if r["tokens"] in alone]
    if slower:
        commits = ", ".join(sorted({r["commit"][:7] for r in busy}))
        yield (
            f"- Calls with a * were measured in another run (commit {commits}), while other programs compiled and ran "
            f"on the same GPU: cuDNN took up to {max(slower):.1f} times as long as in the other calls of so many "
            "tokens. Compare roughly, and only within a line."
        )


def _aims(row: Row) -> Iterator[str]:
    where = f"{row['tokens']} tokens, {_heads(row)} per K/V head"
    for direction, aim in AIMS.items():
        rate, ms = _tflops(row, direction), _ms(row, f"selected, {direction}")
        yield (
            f"- The aim is {aim} TFLOP/s of what is chosen, {direction} at {where}. "
            f"{'Reached' if rate >= aim else 'Missed'}: {ms:.1f} ms, {rate:.0f} TFLOP/s."
        )
    for direction, aim in WHOLE_AIMS.items():
        if (what := f"whole, {direction}") in row["seconds"]:
            ms = _ms(row, what)
            yield (
                f"- The aim is {aim} ms for the whole operation, {direction} at {where}. "
                f"{'Reached' if ms <= aim else 'Missed'}: {ms:.1f} ms."
            )


def _heads(row: Row) -> str:
    return "1 head" if row["group"] == 1 else f"{row['group']} heads"


def _ms(row: Row, what: str) -> float:
    return row["seconds"][what]["median"] * 1e3


def _tflops(row: Row, direction: str) -> float:
    """Of what is chosen: two products forward, seven with the backward."""
    products = 2 if direction == "forward" else 7
    flops = 2 * products * row["tokens"] * row["heads"] * row["keys"] * DIM
    return flops / row["seconds"][f"selected, {direction}"]["median"] / 1e12


def _dense(row: Row, direction: str) -> str:
    what = f"dense cudnn, {direction}"
    return f"{_ms(row, what):.2f} ms" if what in row["seconds"] else ""


def _memory(row: Row, what: str) -> str:
    return " / ".join(f"{row['memory'][f'{what}, {d}'] / 2**20:.0f} MiB" for d in DIRECTIONS)
