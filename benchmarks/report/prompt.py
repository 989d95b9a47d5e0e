"""Time to the first token of a long prompt: whole models, dense and with HADS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.report.words import source, table

PEER = "dense by cudnn"
NAMES = {
    "qwen2.5-1.5b": "Qwen2.5-1.5B, random weights",
    "smollm2-135m": "SmolLM2-135M, random weights",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}
LENGTH = 32768  # to which the aims belong
# Times cuDNN's speed, by budget; MFU of the peer at least; chunks over one piece at most.
AIMS, AIM_MFU, AIM_CHUNKS = {"HADS 20%": 1.5, "HADS 10%": 1.65}, 0.45, 1.1

Row = dict[str, Any]


def gpu_prompt() -> str:
    run = record.load("gpu_prompt")
    rows = run["results"]
    heads = ["model", "tokens", "way", "time to first token", "over dense by cuDNN", "MFU"]
    cells = [
        [
            NAMES[r["model"]],
            str(r["length"]),
            way.replace("cudnn", "cuDNN"),
            f"{t['median'] * 1e3:.1f} ms ({t['low'] * 1e3:.1f}-{t['high'] * 1e3:.1f})",
            "" if way == PEER else f"{_gain(r, way):.2f}x",
            f"{r['mfu'][way]:.0%}" if r["mfu"].get(way) is not None else "",
        ]
        for r in rows
        for way, t in r["seconds"].items()
    ]
    lines = [*table(heads, cells), "", *_facts(rows), *kernels_of_chunks(rows[0])]
    older = [f"{NAMES[r['model']]}: commit {r['commit'][:7]}." for r in rows if "commit" in r]
    return "\n".join([*lines, "", " ".join([source("gpu_prompt.json", run, "jax"), *older])])


def _facts(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row["length"] == LENGTH:
            yield from _aims(row)
    if slower := [f"{NAMES[r['model']]}, {way}" for r in rows for way in r["seconds"] if _gain(r, way) < 1]:
        yield f"- Slower than dense by cuDNN: {'; '.join(slower)}."


def _aims(row: Row) -> Iterator[str]:
    yield f"- {NAMES[row['model']]}:"
    for way, aim in AIMS.items():
        yield f"  - The aim with {way} is {aim}x. {_said(_gain(row, way) >= aim)}."
    yield f"  - The aim of its prefill by cuDNN is {AIM_MFU:.0%} MFU. {_said(row['mfu'][PEER] >= AIM_MFU)}."
    for way in row["seconds"]:
        if (whole := _in_one_piece(way)) is None:
            continue
        cost, pieces = row["seconds"][way]["median"] / row["seconds"][whole]["median"], way.split(", ")[-1]
        if whole == "dense":
            yield f"  - Read densely, {pieces} tokens take {cost - 1:.1%} more time than one piece."
        else:
            yield (
                f"  - The aim of {pieces} tokens is at most {AIM_CHUNKS - 1:.0%} more time than one piece. "
                f"{_said(cost <= AIM_CHUNKS)}: {cost - 1:.1%}."
            )


def kernels_of_chunks(row: Row) -> Iterator[str]:
    """What the chip does in one piece and in chunks, with HADS, if the profiler was asked."""
    for way, found in row.get("kernels", {}).items():
        whole = _in_one_piece(way)
        if whole in (None, "dense") or found is None or (before := row["kernels"].get(whole)) is None:
            continue
        names = dict.fromkeys([*before["kernels"], *found["kernels"]])
        yield from ["", f"Kernels of {whole} in one piece and in {way.split(', ')[-1]}: milliseconds and launches.", ""]
        yield from table(
            ["kernel", "one piece", "chunks"],
            [[f"`{name}`", *(_of_kernel(x["kernels"].get(name)) for x in (before, found))] for name in names]
            + [["all", *(f"{x['busy'] * 1e3:.1f} ({x['launches']})" for x in (before, found))]]
            + [["from the first to the last", *(f"{x['span'] * 1e3:.1f}" for x in (before, found))]],
        )


def _of_kernel(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['seconds'] * 1e3:.1f} ({found['launches']})"


def _in_one_piece(way: str) -> str | None:
    """The same way without chunks; None if it has none."""
    found = re.fullmatch(r"(.*), chunks of \d+", way)
    return found[1] if found else None


def _said(reached: bool) -> str:
    return "Reached" if reached else "Missed"


def _gain(row: Row, way: str) -> float:
    return row["seconds"][PEER]["median"] / row["seconds"][way]["median"]
