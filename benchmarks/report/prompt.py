"""Time to the first token of a long prompt: whole models, dense and with HADS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.report.words import source, table

PEER = "dense by cudnn"
NAMES = {"qwen2.5-1.5b": "Qwen2.5-1.5B", "smollm2-135m": "SmolLM2-135M"}
# Of Qwen2.5-1.5B: times cuDNN's speed, by budget; MFU of the peer at least; chunks over one piece at most.
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
    return "\n".join([*table(heads, cells), "", *_facts(rows), "", source("gpu_prompt.json", run, "jax")])


def _facts(rows: list[Row]) -> Iterator[str]:
    row = rows[0]
    for way, aim in AIMS.items():
        yield f"- The aim of {NAMES[row['model']]} is {aim}x with {way}. {_said(_gain(row, way) >= aim)}."
    yield f"- The aim of its prefill by cuDNN is {AIM_MFU:.0%} MFU. {_said(row['mfu'][PEER] >= AIM_MFU)}."
    for way in row["seconds"]:
        if found := re.fullmatch(r"(.*), chunks of (\d+)", way):
            cost = row["seconds"][way]["median"] / row["seconds"][found[1]]["median"]
            yield (
                f"- The aim of chunks of {found[2]} tokens is at most {AIM_CHUNKS - 1:.0%} more time than one piece. "
                f"{_said(cost <= AIM_CHUNKS)}: {cost - 1:.0%}."
            )
    if slower := [f"{NAMES[r['model']]}, {way}" for r in rows for way in r["seconds"] if _gain(r, way) < 1]:
        yield f"- Slower than dense by cuDNN: {'; '.join(slower)}."


def _said(reached: bool) -> str:
    return "Reached" if reached else "Missed"


def _gain(row: Row, way: str) -> float:
    return row["seconds"][PEER]["median"] / row["seconds"][way]["median"]
