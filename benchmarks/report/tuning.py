"""The tuning database that is shipped for each device kind: its gain over the heuristic, and its races of HADS.

Nothing here depends on the kernels' sources: an edited kernel must not change a page.
"""

from __future__ import annotations

import json

from benchmarks import record
from benchmarks.report.words import Row, listing, times
from xsake.autotune.write.report import FASTER, SAME

SOURCES = {
    "measured": "races on the device",
    "schedule": "cycles of the compiler's schedules",
    "record": "recorded benchmarks",
}


def shipped() -> str:
    """Configurations of attention."""

    def gains(found: Row) -> list[float]:
        return [entry["speedup"] for entry in found["entries"]]

    def versions(found: Row) -> str:
        used = {entry["environment"] for entry in found["entries"]}
        seen = [e["versions"] for name, e in found["environments"].items() if name in used]
        return "; ".join(", ".join(f"{k} {v[k]}" for k in ("jax", "libtpu") if k in v) for v in seen)

    columns = {
        "file": "`{file}`",
        "entries": lambda found: str(len(found["entries"])),
        "found by": _sources,
        f"at least {FASTER - 1:.0%} faster than the heuristic": lambda x: str(sum(g >= FASTER for g in gains(x))),
        f"heuristic within {SAME - 1:.0%}": lambda found: str(sum(gain <= SAME for gain in gains(found))),
        "largest gain": lambda found: times(max(gains(found))),
        "versions": versions,
    }
    return listing(_of("attention"), columns)


def races() -> str:
    """Sparse and dense attention by HADS."""

    def lengths(found: Row, kind: str, sparse: bool) -> str:
        all_of = [e for e in found["entries"] if e["key"]["direction"] == kind and e["config"]["sparse"] == sparse]
        return str(len(all_of)) if all_of else "-"

    columns = {"file": "`{file}`", "found by": _sources}
    for kind, name in (("prompt", "prompts"), ("chunk", "chunks"), ("training", "training"), ("decode", "new tokens")):
        columns[f"{name}: sparse / dense was faster"] = lambda found, kind=kind: " / ".join(
            lengths(found, kind, sparse) for sparse in (True, False)
        )
    return listing([found for found in _of("hads") if found["entries"]], columns)


def _sources(found: Row) -> str:
    return " and ".join(sorted({SOURCES[entry["source"]] for entry in found["entries"]}))


def _of(operation: str) -> list[Row]:
    """The files, with their entries for one operation."""
    paths = [path for path in sorted((record.ROOT / "tuning_db").glob("*.json")) if path.name != "schema.json"]
    found = [json.loads(path.read_text()) | {"file": path.name} for path in paths]
    for one in found:
        one["entries"] = [entry for entry in one["entries"] if entry["key"]["operation"] == operation]
    return found
