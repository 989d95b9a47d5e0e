"""The tuning database that is shipped for each device kind, and its gain over the heuristic.

Nothing here depends on the kernels' sources: an edited kernel must not change a page.
"""

from __future__ import annotations

import json

from benchmarks import record
from benchmarks.report.words import table
from xsake.autotune.write.report import FASTER, SAME

SOURCES = {"measured": "races on the device", "schedule": "cycles of the compiler's schedules"}


def shipped() -> str:
    heads = [
        "file",
        "entries",
        "found by",
        f"at least {FASTER - 1:.0%} faster than the heuristic",
        f"heuristic within {SAME - 1:.0%}",
        "largest gain",
        "versions",
    ]
    rows = []
    for path in sorted((record.ROOT / "tuning_db").glob("*.json")):
        if path.name == "schema.json":
            continue
        database = json.loads(path.read_text())
        entries = database["entries"]
        gains = [entry["speedup"] for entry in entries]
        versions = [e["versions"] for e in database["environments"].values()]
        rows.append(
            [
                f"`{path.name}`",
                str(len(entries)),
                " and ".join(sorted({SOURCES[entry["source"]] for entry in entries})),
                str(sum(gain >= FASTER for gain in gains)),
                str(sum(gain <= SAME for gain in gains)),
                f"{max(gains):.2f}x",
                "; ".join(", ".join(f"{k} {v[k]}" for k in ("jax", "libtpu") if k in v) for v in versions),
            ]
        )
    return table(heads, rows)
