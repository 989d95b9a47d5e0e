"""The documents `api/benchmarks` and `api/benchmarks/{id}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xsake.dashboard.read.benchmark_catalogue import Benchmark, catalogue, read_record
from xsake.dashboard.read.run_events import plain
from xsake.dashboard.serve.problems import NotFound
from xsake.dashboard.show import benchmark_plots, benchmark_tables


def overview(records: Path | None) -> dict[str, Any]:
    return {"benchmarks": [_entry(records, one)[0] for one in catalogue(records)] if records else []}


def benchmark(records: Path | None, identity: str) -> dict[str, Any]:
    for one in catalogue(records) if records else []:
        if one.id == identity:
            entry, record = _entry(records, one)
            return entry | _contents(one, record)
    raise NotFound(f"there is no benchmark {identity[:100]!r}; api/benchmarks lists those there are")


def _entry(records: Path | None, one: Benchmark) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The entry of the list, and the record if there is one."""
    entry = {key: getattr(one, key) for key in ("id", "title", "group", "measures", "command", "needs")}
    entry |= {"state": "not_run", "reason": None, "date": None, "device": None, "commit": None}
    if one.path is None or records is None:
        return entry, None
    try:
        record = read_record(records, one.path)
    except ValueError as error:
        return entry | {"state": "unreadable", "reason": str(error)}, None
    environment = record["environment"]
    return entry | {"state": "recorded", **{k: environment.get(k) for k in ("date", "device", "commit")}}, record


def _contents(one: Benchmark, record: dict[str, Any] | None) -> dict[str, Any]:
    if record is None:
        return {"environment": None, "notes": [], "plots": [], "tables": []}
    try:
        plots, notes = benchmark_plots.plots(one.id, record)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        plots, notes = [], [f"This record cannot be plotted ({type(error).__name__}: {error}); its tables are whole."]
    if isinstance(unit := record["environment"].get("unit"), str):
        notes = [*notes, f"Unit: {unit}."]
    rows = record.get("results", record.get("scores"))
    if "methods" in record:
        rows = {"methods": record["methods"], "tasks": record.get("tasks")}
    tables = benchmark_tables.tables(rows)
    return {"environment": plain(record["environment"]), "notes": notes, "plots": plain(plots), "tables": plain(tables)}
