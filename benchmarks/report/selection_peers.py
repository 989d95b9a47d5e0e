"""Our raw Triton kernels and other libraries on the same chosen blocks, and in words what failed or was wrong."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.selection import DIRECTIONS, EJKERNEL, MENDED, RAW_TRITON
from benchmarks.report.words import table

NAMES = {RAW_TRITON: "raw Triton", EJKERNEL: "ejkernel", MENDED: "ejkernel with a mended backward"}

Row = dict[str, Any]


def tokens(row: Row) -> str:
    """With a star where the GPU was busy with other programs, too."""
    return f"{row['tokens']}{' *' if row.get('busy') else ''}"


def lines(rows: list[Row]) -> list[str]:
    """Nothing for a record without such runs."""
    beside = [r for r in rows if any(peer["raced"] for peer in r.get("peers", {}).values())]
    said = _words(rows)
    if not beside:
        return said
    peers = [name for name in NAMES if any(f"{name}, {d}" in r.get("peers", {}) for r in rows for d in DIRECTIONS)]
    heads = ["tokens", "heads per K/V head", "choice", "direction", "xsake", *(NAMES[name] for name in peers)]
    cells = [
        [tokens(r), str(r["group"]), r["choice"], d, *(_cell(r, who, d) for who in ("selected", *peers))]
        for r in beside
        for d in DIRECTIONS
    ]
    begin = "Other kernels with the same blocks; in brackets, how many times as long as xsake they take."
    if MENDED in peers:
        begin += (
            " With a mended backward, ejkernel counts the rows of a launch by NumPy, and not by a traced operation."
        )
    return [begin, "", *table(heads, cells), *(["", *said] if said else [])]


def _cell(row: Row, who: str, direction: str) -> str:
    seconds, name = row["seconds"], f"{who}, {direction}"
    if name not in seconds:
        return "not raced" if name in row["peers"] else ""
    own, ours = seconds[name]["median"], seconds[f"selected, {direction}"]["median"]
    return f"{own * 1e3:.2f} ms" + ("" if who == "selected" else f" ({own / ours:.2f}x)")


def _words(rows: list[Row]) -> list[str]:
    """A line for each contestant and each thing that is said of it, with the calls that it is said of."""
    calls: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            if peer["words"]:
                call = f"{row['tokens']} tokens, {row['group']} heads per K/V head, {row['choice']}"
                who, direction = name.rsplit(", ", 1)
                calls.setdefault((who, direction, peer["words"]), []).append(call)
    return [
        f"- {NAMES[who]}, {direction} ({'; '.join(which)}): `{words.replace('`', chr(39))}`"
        for (who, direction, words), which in calls.items()
    ]
