"""Events of a run file: from lines to objects, and from objects to what the pages get."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import from_json  # three times as fast as json; FastAPI brings it

Event = dict[str, Any]
OWN_FIELDS = ("event", "step", "time")  # of a step's event; all others are metrics
_NAME = re.compile(r"[a-z][a-z_]{0,31}")
_LARGEST_STEP = 2**53
LONGEST = 1e12  # seconds, 30,000 years: sums and products of such times stay finite, and an id holds them


def parse_lines(data: bytes) -> list[Event]:
    """The events among these lines. Other lines are left out."""
    lines = data.count(b"\n")
    # All lines in one call is faster than line by line; the checks make sure that it means the same.
    if data[:1] == b"{" and data[-2:] == b"}\n" and data.count(b"}\n{") == lines - 1:
        with contextlib.suppress(ValueError):
            events = from_json(b"[" + data[:-1].replace(b"\n", b",") + b"]")
            if len(events) == lines:
                return [event for event in events if is_event(event)]
    return [event for event in _one_by_one(data.split(b"\n")) if is_event(event)]


def _one_by_one(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield from_json(line)


def is_event(event: Any) -> bool:
    if type(event) is not dict or type(event.get("event")) is not str:
        return False
    step = event.get("step")
    return type(step) is int and 0 <= step < _LARGEST_STEP


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def longer(seconds: float, step: Event) -> float:
    """The seconds spent in steps after this one.

    >>> longer(1.0, {"seconds": 0.5}), longer(1.0, {"seconds": -1e308}), longer(1.0, {"seconds": 1e308})
    (1.5, 1.0, 1000000000000.0)
    """
    return min(seconds + max(number(step.get("seconds")) or 0.0, 0.0), LONGEST)


def shown(event: Event, seconds: float) -> tuple[str, Event]:
    """The name and the data of an event in the stream; `seconds` were spent in steps until the event."""
    name = event["event"] if _NAME.fullmatch(event["event"]) else "other"
    data = {key: plain(value) for key, value in event.items() if key not in ("event", "time")}
    data["time"] = round(seconds, 6)
    if "time" in event:
        data["at"] = number(event["time"])
    if name == "eval":
        data["held_out_loss"] = data.pop("loss", None)
    if name == "density" and (layers := density_table(event.get("layers"))):
        data["density"] = mean_density(layers)
    return name, data


def plain(value: Any, depth: int = 8) -> Any:
    """The value for JSON: numbers that are not finite as floats and values nested too deeply become None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if number(value) is not None else None
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {str(key): plain(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner, depth - 1) for inner in value]
    return value


def density_table(given: Any) -> list[list[float]] | None:
    """Densities by layer and head, or None if it is no such table."""
    if not isinstance(given, list) or not 1 <= len(given) <= 1024:
        return None
    table = []
    for row in given:
        if not isinstance(row, list) or not 1 <= len(row) <= 1024:
            return None
        values = [number(value) for value in row]
        if any(value is None or not 0 <= value <= 1 for value in values):
            return None
        table.append([value for value in values if value is not None])
    return table


def mean_density(table: list[list[float]]) -> float:
    values = [value for row in table for value in row]
    return round(sum(values) / len(values), 6)


def to_json(document: Any) -> bytes:
    """Compact JSON, in which numbers that are not finite as floats are null.

    >>> to_json({"loss": [1.5, float("nan"), 10**5000]})
    b'{"loss":[1.5,null,null]}'
    """
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(plain(document, depth=100), allow_nan=False, separators=(",", ":")).encode()


class Sent(NamedTuple):
    """An event for followers: its name, its id (None where there is none to resume from) and its data as JSON."""

    name: str
    identity: str | None
    data: bytes

    @classmethod
    def of(cls, name: str, data: Any, identity: str | None = None) -> Sent:
        return cls(name, identity, to_json(data))

    def as_frame(self) -> bytes:
        """One event of a `text/event-stream`. JSON has no raw line feed, so that the data is one line."""
        head = f"id: {self.identity}\n" if self.identity else ""
        return f"{head}event: {self.name}\ndata: ".encode() + self.data + b"\n\n"

    def as_entry(self, run: str) -> bytes:
        """The event as JSON, for a stream that carries several runs."""
        head = {"run": run, "event": self.name, "id": self.identity}
        return to_json(head)[:-1] + b',"data":' + self.data + b"}"


def frame(name: str, data: Any) -> bytes:
    return Sent.of(name, data).as_frame()
