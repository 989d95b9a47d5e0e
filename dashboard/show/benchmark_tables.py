"""Any record as tables: one row per measurement, one column per field, quartiles in one cell."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from xsake._ground.words import COLUMNS
from xsake.dashboard.read.run_events import number

MOST_ROWS = 2000
_UNITS = {
    "seconds": "s",
    "burst": "s",
    "sustained": "s",
    "wall_seconds": "s",
    "microseconds": "µs",
    "mask_ms": "ms",
    "attention_ms": "ms",
    "tflops": "TFLOP/s",
    "tokens_per_second": "tokens/s",
    "kl": "nats per token",
    "kl_of_tokens": "nats",
    "largest_kl": "nats",
    "train_loss": "nats per token",
    "held_out_loss": "nats per token",
    "bytes": "bytes",
    "memory": "bytes",
    "peak_process_bytes": "bytes",
    "watts": "W",
    "celsius": "°C",
    "sm_mhz": "MHz",
}
_SHARES = {"density", "mfu", "asked", "budget", "retention", "same_token", "active_blocks", "perplexity_gap"}
_LEFT_OUT = {"config", "loss_curve", "held_out_losses", "run_file", "environment", "digest"}


def tables(results: Any) -> list[dict[str, Any]]:
    """Tables of the lists of a record; its single values make a table of their own."""
    if isinstance(results, list):
        return [table("all", "Every measurement", results)]
    if not isinstance(results, dict):
        return []
    lists = {name: value for name, value in results.items() if _is_rows(value)}
    single = {name: value for name, value in results.items() if name not in lists and value not in (None, [])}
    made = [table("values", "Values", [single])] if single else []
    return made + [table(name, name.replace("_", " "), rows) for name, rows in lists.items()]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def table(identity: str, title: str, rows: list[Any]) -> dict[str, Any]:
    flat = [flatten(row) for row in rows[:MOST_ROWS] if isinstance(row, dict)]
    names = list(dict.fromkeys(name for row in flat for name in row))
    # Columns in the order of their first row, but times after what they are times of.
    names.sort(key=lambda name: any(is_spread(row.get(name)) for row in flat))
    return {
        "id": identity,
        "title": title,
        "columns": [column(name, [row[name] for row in flat if row.get(name) is not None]) for name in names],
        "rows": [[cell(row.get(name), name) for name in names] for row in flat],
        "left_out": max(len(rows) - MOST_ROWS, 0),
    }


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as `outer inner`; quartiles stay together."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, dict) and not is_spread(value):
            flat |= flatten(value, f"{prefix}{name} ")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_spread(value: Any) -> bool:
    return isinstance(value, dict) and {"median", "low", "high"} <= set(value)


def spread(value: Any) -> dict[str, Any] | None:
    """{"y", "low", "high", "n"} of a median with quartiles, or of a plain number."""
    if is_spread(value):
        rounds = value.get("rounds")
        return {
            "y": number(value["median"]),
            "low": number(value["low"]),
            "high": number(value["high"]),
            "n": rounds if isinstance(rounds, int) else None,
        }
    plain = number(value)
    return None if plain is None else {"y": plain, "low": None, "high": None, "n": None}


def column(name: str, values: Iterable[Any]) -> dict[str, Any]:
    values = list(values)
    last = name.rpartition(" ")[2]
    unit = next((_UNITS[word] for word in [last, *name.split(" ")] if word in _UNITS), None)
    if values and all(is_spread(value) for value in values):
        kind = "spread"
    elif values and all(number(value) is not None for value in values):
        kind = "share" if last in _SHARES else "number"
    else:
        kind = "text"
    return {"name": name.replace("_", " "), "unit": unit if kind != "share" else None, "kind": kind}


def cell(value: Any, column: str = "") -> Any:
    if isinstance(value, str) and column in COLUMNS:
        return COLUMNS[column](value)
    if is_spread(value):
        return spread(value)
    if value is None or isinstance(value, str | bool | int):
        return "yes" if value is True else "no" if value is False else value
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, sort_keys=True)[:300]
