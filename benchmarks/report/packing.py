"""Small blocks of queries, packed with the heads of their group, beside blocks that need no packing."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.gpu.packing import BLOCK_Q, PRODUCTS
from benchmarks.report.words import source, table

AIM = 0.9  # of the throughput of blocks that need no packing
SMALL, TALL = BLOCK_Q

Row = dict[str, Any]


def gpu_packing() -> str:
    """Nothing until a run is recorded."""
    if not (record.RESULTS / "gpu_packing.json").exists():
        return ""
    run = record.load("gpu_packing")
    return "\n".join([*section(run["results"]), "", source("gpu_packing.json", run, "jax")])


def section(rows: list[Row]) -> list[str]:
    pairs = [(_row(rows, SMALL, r), r) for r in rows if r["block_q"] == TALL]
    heads = ["keys per block", "density", "direction", *(f"{n} queries per block" for n in BLOCK_Q), "ratio"]
    cells = [_line(small, tall, d) for small, tall in pairs for d in PRODUCTS]
    missed = [
        f"{tall['block_kv']} keys per block, {tall['asked']:.0%}, {d}: {_ratio(small, tall, d):.2f}"
        for small, tall in pairs
        for d in PRODUCTS
        if _ratio(small, tall, d) < AIM
    ]
    of, group = rows[0], rows[0]["heads"] // rows[0]["kv_heads"]
    return [
        "### Small blocks of queries",
        "",
        f"{of['tokens']} tokens, {of['heads']} heads on {of['kv_heads']}, D 128, bfloat16, causal; random masks that "
        f"differ between K/V heads. A block of {SMALL} queries is packed with the {group} heads of its group. TFLOP/s "
        "count the pairs of tokens that attend.",
        "",
        *table(heads, cells),
        "",
        f"- The aim is {AIM} of the throughput of {TALL} queries per block at the same density. "
        + (f"Missed: {'; '.join(missed)}." if missed else "Reached in every call of the table."),
        f"- The error of output and gradients against XLA in float32 is at most {max(r['error'] for r in rows):.1e} of "
        "the norm.",
    ]


def _row(rows: list[Row], block_q: int, like: Row) -> Row:
    wanted = (block_q, like["block_kv"], like["asked"])
    return next(r for r in rows if (r["block_q"], r["block_kv"], r["asked"]) == wanted)


def _line(small: Row, tall: Row, direction: str) -> list[str]:
    call = [str(tall["block_kv"]), f"{tall['asked']:.0%}", direction]
    return [*call, _cell(small, direction), _cell(tall, direction), f"{_ratio(small, tall, direction):.2f}"]


def _cell(row: Row, direction: str) -> str:
    return f"{row['seconds'][direction]['median'] * 1e3:.2f} ms ({row['tflops'][direction]:.0f} TFLOP/s)"


def _ratio(small: Row, tall: Row, direction: str) -> float:
    return small["tflops"][direction] / tall["tflops"][direction]
