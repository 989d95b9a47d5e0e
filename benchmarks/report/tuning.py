"""The tuning database that is shipped for each device kind, and its gain over the heuristic.

Nothing here depends on the kernels' sources: an edited kernel must not change a page.
"""

from __future__ import annotations

import json

from benchmarks import record
from benchmarks.report.words import Row, listing, times
from xsake.autotune.write.report import FASTER, SAME

SOURCES = {"measured": "races on the device", "schedule": "cycles of the compiler's schedules"}


def shipped() -> str:
    def gains(found: Row) -> list[float]:
        return [entry["speedup"] for entry in found["entries"]]

    def versions(found: Row) -> str:
        seen = [e["versions"] for e in found["environments"].values()]
        return "; ".join(", ".join(f"{k} {v[k]}" for k in ("jax", "libtpu") if k in v) for v in seen)

    columns = {
        "file": "`{file}`",
        "entries": lambda found: str(len(found["entries"])),
        "found by": lambda found: " and ".join(sorted({SOURCES[entry["source"]] for entry in found["entries"]})),
        f"at least {FASTER - 1:.0%} faster than the heuristic": lambda x: str(sum(g >= FASTER for g in gains(x))),
        f"heuristic within {SAME - 1:.0%}": lambda found: str(sum(gain <= SAME for gain in gains(found))),
        "largest gain": lambda found: times(max(gains(found))),
        "versions": versions,
    }
    paths = [path for path in sorted((record.ROOT / "tuning_db").glob("*.json")) if path.name != "schema.json"]
    return listing([json.loads(path.read_text()) | {"file": path.name} for path in paths], columns)
