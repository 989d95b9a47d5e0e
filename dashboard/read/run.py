"""Run: the state of one training run, kept up to date from its file, in bounded memory."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import operator
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from xsake.dashboard.read.inside import open_inside
from xsake.dashboard.read.line_reader import Lines, Place, checksum, is_still_there, read_lines
from xsake.dashboard.read.run_events import (
    LONGEST,
    OWN_FIELDS,
    Event,
    Sent,
    density_table,
    longer,
    mean_density,
    number,
    parse_lines,
    shown,
)
from xsake.dashboard.read.thinning import Curve, Points, joined

LIVE = 1 << 16  # an update of at most so many bytes is sent to followers from memory
RECENT = 1 << 18  # bytes of events that are kept for followers
MOST_METRICS = 64
MOST_NOTED = 256  # densities, resumes, ... that are kept
_INDEX_EVERY = 1 << 16  # bytes of the file between two entries of the index
_MOST_INDEXED = 4096
_MOST_ZOOMED = 32 << 20  # bytes of the file that a zoom reads again


class Noted:
    """A bounded list: when it is full, every second entry is dropped, and from then on every second is taken."""

    def __init__(self) -> None:
        self._every, self._seen = 1, 0
        self.entries: list[Any] = []
        self.last: Any = None

    def add(self, entry: Any) -> None:
        self.last = entry
        if self._seen % self._every == 0:
            self.entries.append(entry)
        self._seen += 1
        if len(self.entries) > MOST_NOTED:
            self.entries = self.entries[::2]
            self._every *= 2

    def all(self) -> list[Any]:
        """The entries, and the last one in any case."""
        return self.entries if not self.entries or self.entries[-1] is self.last else [*self.entries, self.last]


@dataclasses.dataclass
class State:
    """All that is read from the file; a new one when the file is another."""

    place: Place = dataclasses.field(default_factory=Place)
    skipping: bool = False
    step: int = 0
    seconds: float = 0.0
    start: Event = dataclasses.field(default_factory=dict)
    last: Event = dataclasses.field(default_factory=dict)  # the last step
    failed: Event | None = None
    process: Any = None  # that writes the file: host and pid
    at: float | None = None  # date of the last event that has one
    events: int = 0
    curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    densities: Noted = dataclasses.field(default_factory=Noted)
    resumed: Noted = dataclasses.field(default_factory=Noted)
    recalibrated: Noted = dataclasses.field(default_factory=Noted)
    recent_seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=64))
    index: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # (step, offset, microseconds)
    index_every: int = _INDEX_EVERY


@dataclasses.dataclass
class Written:
    """Events for followers, from one place of the file to another, formatted once for all of them."""

    start: int
    end: Place
    events: list[Sent]

    @cached_property
    def frames(self) -> bytes:
        return b"".join(event.as_frame() for event in self.events)


class Run:
    """One run file. `update` reads what is new; everything else asks about what was read."""

    def __init__(self, *, identity: str, name: str, shown_path: str, root: Path, path: Path, recorded: bool = False):
        self.id, self.name, self.shown_path, self.recorded = identity, name, shown_path, recorded
        self._root, self._path = root, path
        self.lock = threading.RLock()
        self.state = State()
        self.generation = 0  # counts how often the file became another one
        self.reset_reason = ""
        self.gone = False
        self.problem: str | None = None
        self.file_bytes = 0
        self.modified = 0.0
        self.is_read = False  # all that the file holds, but for an unfinished line
        self._seen: tuple[int, int, int] | None = None  # inode, size and date of the file when it was last read
        self.recent: deque[Written] = deque()

    # -- reading ---------------------------------------------------------------------------------------------------

    def open(self) -> BinaryIO:
        return open_inside(self._root, self._path)

    def update(self, most: int = 8 << 20) -> bool:
        """Read about `most` new bytes; returns whether anything changed. What is wrong with the file is no error here:
        `gone` and `problem` tell.

        The lock is held for a piece at a time, so that a question about a long file is answered while it is read.
        """
        try:
            about = os.stat(self._path)
            version = (about.st_ino, about.st_size, about.st_mtime_ns)
            if version == self._seen and (self.is_read or self.problem is not None) and not self.gone:
                return False
            self._seen, changed = version, True
            with self.blamed(), self.open() as file:
                with self.lock:
                    changed = self._look(file)
                while most > 0 and not self.is_read:
                    with self.lock:
                        most -= (read := self._read_piece(file))
                    changed = changed or read > 0
                    time.sleep(0.0005 if most > 0 and not self.is_read else 0)  # let others have the lock
        except FileNotFoundError:
            changed, self.gone = not self.gone, True
        except OSError as error:  # such as a missing permission: it may pass without any change of the file
            self._seen = None
            changed, self.problem = self.problem is None, error.strerror or str(error)
        return changed

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Make an exception inside this run's `problem`, until its file changes. OSErrors pass through."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            self.problem = f"the run file cannot be shown: {type(error).__name__}: {error}"[:300]

    def is_gone(self) -> bool:
        """Whether there is no file any more. This takes no file descriptor, of which there may be none left."""
        try:
            os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False

    def _look(self, file: BinaryIO) -> bool:
        """Whether something is other than before, apart from what was added."""
        about = os.fstat(file.fileno())
        self.file_bytes, self.modified = about.st_size, about.st_mtime
        changed = self.gone or self.problem is not None
        self.gone, self.problem, self.is_read = False, None, False
        if not is_still_there(file, self.state.place) and not self.state.skipping:
            self._forget()
            changed = True
        return changed

    def _read_piece(self, file: BinaryIO) -> int:
        """Read about a megabyte; returns how many bytes, 0 at the end of what is there."""
        before = self.state.place.offset
        lines = read_lines(file, before, skipping=self.state.skipping)
        if lines.offset == before:
            self.is_read = True
        else:
            self._take(lines)
        return lines.offset - before

    def _forget(self) -> None:
        """The file was cut or replaced: a resumed run drops the steps after its checkpoint."""
        self.state = State()
        self.recent.clear()
        self.generation += 1
        self.reset_reason = "the run file was cut or replaced, as when a run resumes from a checkpoint"

    @property
    def read_share(self) -> float | None:
        """How much of a long file has been read yet; None if all of it."""
        return None if self.is_read else round(self.state.place.offset / max(self.file_bytes, 1), 3)

    def _take(self, lines: Lines) -> None:
        state, start = self.state, self.state.place
        state.skipping = lines.skipping
        if not lines.data:
            state.place = Place(lines.offset, 0, start.microseconds)
            return
        self._note_index(start)
        if len(lines.data) <= LIVE:
            self.recent.append(self._one_by_one(lines.data, start))
            while sum(one.end.offset - one.start for one in self.recent) > RECENT:
                self.recent.popleft()
        else:
            self.recent.clear()
            self._add(parse_lines(lines.data))
        state.place = Place(lines.offset, checksum(lines.data), round(state.seconds * 1e6))

    def _one_by_one(self, data: bytes, start: Place) -> Written:
        """Read live lines: each becomes an event with an id of its own for the followers."""
        parts = []
        offset = start.offset
        for line in data.splitlines(keepends=True):
            offset += len(line)
            for event in parse_lines(line):
                self._add([event])
                place = Place(offset, checksum(data[: offset - start.offset]), round(self.state.seconds * 1e6))
                parts.append(Sent.of(*shown(event, self.state.seconds), identity=str(place)))
        end = Place(offset, checksum(data), round(self.state.seconds * 1e6))
        return Written(start.offset, end, parts)

    def _note_index(self, place: Place) -> None:
        index = self.state.index
        if not index or place.offset - index[-1][1] >= self.state.index_every:
            index.append((self.state.step, place.offset, place.microseconds))
        if len(index) > _MOST_INDEXED:
            self.state.index = index[::2]
            self.state.index_every *= 2

    # -- events ----------------------------------------------------------------------------------------------------

    def _add(self, events: list[Event]) -> None:
        state = self.state
        state.events += len(events)
        steps = [event for event in events if event["event"] == "step"]
        if steps:
            self._add_steps(steps)
        for event in events:
            if event["event"] != "step":
                self._add_other(event)
        for event in reversed(events[-64:]):
            if (at := number(event.get("time"))) is not None:
                state.at = at
                break

    def _add_steps(self, steps: list[Event]) -> None:
        state = self.state
        read = read_steps(steps, after=state.step if state.last else -1, seconds=state.seconds)
        if read is None:
            return
        for name, points in read.metrics.items():
            self._extend(name, points)
        state.step, state.seconds, state.last = read.step, read.seconds, read.last
        if "seconds" in read.metrics:
            state.recent_seconds.extend(_durations(read.metrics["seconds"].value[-64:]).tolist())

    def _extend(self, name: str, points: Points) -> None:
        curves = self.state.curves
        if name not in curves:
            if len(curves) >= MOST_METRICS or np.isnan(points.value).all():
                return  # a metric that has no number yet, such as an MFU that is not known
            curves[name] = Curve()
        last = curves[name].points.step[-1:]
        if len(last) and points.step[0] <= last[0]:
            points = points.take(points.step > last[0])
        if len(points):
            curves[name].add(points)

    def _add_other(self, event: Event) -> None:
        state, name, step = self.state, event["event"], event["step"]
        if name == "start":
            state.start, state.process = event, event.get("process")
        elif name == "resumed":
            state.process, state.failed = event.get("process"), None
            state.resumed.add({"step": step, "time": date_of(event.get("time"))})
        elif name == "recalibrate":
            state.recalibrated.add({"step": step, "seconds": number(event.get("seconds"))})
        elif name == "failed":
            state.failed = event
        elif name == "eval":
            if (loss := number(event.get("loss"))) is not None:
                self._extend("held_out_loss", _one(step, state.seconds, loss))
        elif name == "density" and (table := density_table(event.get("layers"))):
            state.densities.add({"step": step, "layers": table})
            self._extend("density", _one(step, state.seconds, mean_density(table)))

    # -- questions -------------------------------------------------------------------------------------------------

    def written_after(self, offset: int) -> list[Written] | None:
        """Recent events from `offset` on; None if they are not in memory."""
        with self.lock:
            if offset == self.state.place.offset:
                return []
            found = [one for one in self.recent if one.start >= offset]
            return found if found and found[0].start == offset else None

    def written_in_file(self, place: Place) -> Written:
        """Events from `place` on, for a follower that comes from far behind."""
        with self.open() as file:
            lines = read_lines(file, place.offset, size=LIVE)
        seconds, parts, offset = place.seconds, [], place.offset
        for line in lines.data.splitlines(keepends=True):
            offset += len(line)
            for event in parse_lines(line):
                if event["event"] == "step":
                    seconds = longer(seconds, event)
                inside = lines.data[: offset - place.offset]
                here = Place(offset, checksum(inside), round(seconds * 1e6))
                parts.append(Sent.of(*shown(event, seconds), identity=str(here)))
        end = Place(lines.offset, checksum(lines.data) if lines.data else place.checksum, round(seconds * 1e6))
        return Written(place.offset, end, parts)

    def is_known(self, place: Place) -> bool:
        """Whether the file still is what it was before this place. Raises OSError if it cannot be read."""
        with self.open() as file:
            return is_still_there(file, place)

    def zoom(self, first: int, last: int) -> dict[str, Points] | None:
        """All steps of this range, read from the file again; None if that is too much of the file."""
        with self.lock:
            state = self.state
            indexed = [entry[0] for entry in state.index]
            begin = state.index[max(bisect.bisect_left(indexed, first) - 1, 0)] if indexed else (0, 0, 0)
            after = bisect.bisect_right(indexed, last)
            end = state.index[after][1] if after < len(indexed) else state.place.offset
        if end - begin[1] > _MOST_ZOOMED:
            return None
        step, seconds = begin[0] if begin[1] else -1, begin[2] / 1e6
        collected: dict[str, list[Points]] = {}
        with self.open() as file:
            for events in _pieces(file, begin[1], end):
                steps = [event for event in events if event["event"] == "step"]
                if (read := read_steps(steps, after=step, seconds=seconds)) is not None:
                    step, seconds = read.step, read.seconds
                    for name, points in read.metrics.items():
                        collected.setdefault(name, []).append(points.between(first, last))
        return {name: joined(parts) for name, parts in collected.items()}

    def step_seconds(self) -> float | None:
        """The median of the last steps' times."""
        recent = list(self.state.recent_seconds)
        return statistics.median(recent) if recent else None

    @property
    def stepped(self) -> bool:
        """Whether the process that writes the file has taken a step, since it began or resumed."""
        resumed = self.state.resumed.last
        return self.state.step > (0 if resumed is None else resumed["step"])

    def last_event(self) -> float:
        """When the run wrote something last, in seconds since 1970."""
        return self.modified if self.state.at is None else max(self.state.at, self.modified)

    def age(self) -> float:
        return max(time.time() - self.last_event(), 0.0)


def _pieces(file: BinaryIO, start: int, end: int) -> Iterator[list[Event]]:
    offset, skipping = start, False
    while offset < end:
        lines = read_lines(file, offset, skipping=skipping)
        if lines.offset == offset:
            return
        offset, skipping = lines.offset, lines.skipping
        yield parse_lines(lines.data)


class Read(NamedTuple):
    """Steps that were read: their metrics, and the last step with the seconds spent until its end."""

    metrics: dict[str, Points]
    step: int
    seconds: float
    last: Event


def read_steps(steps: list[Event], *, after: int, seconds: float) -> Read | None:
    """The steps later than `after`, each once; None if there are none. `seconds` were spent in steps before."""
    if not steps:
        return None
    numbers = np.array([event["step"] for event in steps], np.int64)
    rising = numbers > np.concatenate([[after], np.maximum(np.maximum.accumulate(numbers)[:-1], after)])
    if not rising.all():  # a step that is there twice counts once
        steps = [event for event, kept in zip(steps, rising, strict=True) if kept]
        numbers = numbers[rising]
    if not steps:
        return None
    present = dict.fromkeys(name for event in (steps[0], steps[-1]) for name in event if len(name) <= 100)
    names = [name for name in present if name not in OWN_FIELDS][: 2 * MOST_METRICS]
    columns = dict(zip(names, _columns(steps, names), strict=True))
    times = np.minimum(seconds + np.cumsum(_durations(columns.get("seconds", np.zeros(len(steps))))), LONGEST)
    metrics = {name: Points(numbers, times, values) for name, values in columns.items()}
    return Read(metrics, int(numbers[-1]), float(times[-1]), steps[-1])


def _durations(seconds: np.ndarray) -> np.ndarray:
    return np.nan_to_num(seconds, nan=0.0).clip(0, LONGEST)


def _columns(events: list[Event], names: list[str]) -> list[np.ndarray]:
    """Metrics of all steps; NaN where one is missing or not finite."""
    if not names:
        return []
    try:
        rows = list(map(operator.itemgetter(*names), events))
    except KeyError:
        rows = [tuple(event.get(name) for name in names) for event in events]
    if len(names) == 1:
        rows = [(row,) if not isinstance(row, tuple) else row for row in rows]
    if not set(map(type, itertools.chain.from_iterable(rows))) <= {float, type(None)}:
        rows = [tuple(map(number, row)) for row in rows]
    table = np.array(rows, np.float64)
    return list(np.where(np.isfinite(table), table, np.nan).T)


def _one(step: int, seconds: float, value: float) -> Points:
    return Points(np.array([step], np.int64), np.array([seconds]), np.array([value]))


def date_of(seconds: Any) -> str | None:
    """
    >>> date_of(0), date_of("soon"), date_of(1e300)
    ('1970-01-01T00:00:00+00:00', None, None)
    """
    import datetime

    value = number(seconds)
    if value is None or not 0 <= value < 32503680000:  # year 3000
        return None
    return datetime.datetime.fromtimestamp(round(value), datetime.UTC).isoformat()
