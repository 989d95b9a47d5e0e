"""Live: reads what runs write, a few times per second, and streams it to the browsers that follow.

A follower is a place in the run file, and nothing is queued for it: a browser that reads slowly is only further behind.
The last events are in memory, formatted once for all followers; a follower from further back reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from xsake.dashboard.read.library import Library
from xsake.dashboard.read.line_reader import Place
from xsake.dashboard.read.run import Run, Written
from xsake.dashboard.read.run_events import Sent, to_json
from xsake.dashboard.serve.problems import BadRequest, Busy
from xsake.dashboard.show import run_documents

EVERY = 0.25  # seconds between two readings of a followed run
SEARCH_EVERY = 1.0  # seconds between two searches for runs, and two readings of runs that nobody follows
QUIET = 15.0  # seconds after which a comment is sent, so that a dead connection is noticed
MOST_FOLLOWERS = 256
MOST_FOLLOWED = 32  # runs in one stream
FAR_BEHIND = 8 << 20  # bytes: a follower that resumes from further back loads the curve anew


class Live:
    def __init__(self, library: Library):
        self.library = library
        self._followed: Counter[str] = Counter()
        self.followers = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._statuses: dict[str, tuple[str, str | None]] = {}
        self._list = b""
        self._next_search = 0.0
        self.events_sent = 0
        self.problem: str | None = None  # why the last reading failed

    # -- reading ---------------------------------------------------------------------------------------------------

    async def read_forever(self) -> None:
        """Read what is new, again and again. `problem` says why a reading failed, until one does not."""
        while True:
            try:
                await asyncio.sleep(await self._read())
                self.problem = None
            except Exception as error:
                if self.problem is None:
                    logging.getLogger(__name__).exception("reading the runs failed")
                self.problem = f"the runs cannot be read: {type(error).__name__}: {error}"[:300]
                await asyncio.sleep(SEARCH_EVERY)

    async def _read(self) -> float:
        """Read once; returns the seconds until the next reading."""
        began = time.monotonic()
        changed = await asyncio.to_thread(self._read_followed)
        if began >= self._next_search:
            changed = await asyncio.to_thread(self._read_all) or changed
            took = time.monotonic() - began
            self._next_search = time.monotonic() + max(SEARCH_EVERY, 10 * took)
        if changed:
            self.notify()
        if any(not run.is_read for run in self.library.runs if not run.gone and run.problem is None):
            self._next_search = 0.0
            return 0.005
        return EVERY

    def _read_followed(self) -> bool:
        changed = False
        for identity in list(self._followed):
            run = self.library.get(identity)
            if run is None:
                continue
            changed = run.update() or changed
            with run.blamed(), run.lock:
                status = run_documents.status_of(run)
                changed = changed or self._statuses.get(identity) != status
                self._statuses[identity] = status
        return changed

    def _read_all(self) -> bool:
        """Also makes the list of runs for its followers."""
        self.library.search()
        self.library.update()
        listed = to_json(run_documents.runs(self.library))
        changed, self._list = listed != self._list, listed
        return changed

    def notify(self) -> None:
        """Wake all followers."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def close(self) -> None:
        """End all streams: the server stops."""
        self._closed = True
        self.notify()

    # -- following -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following(self, runs: list[str]) -> Iterator[None]:
        self.followers += 1
        self._followed.update(runs)
        try:
            yield
        finally:
            self.followers -= 1
            self._followed -= Counter(runs)

    def check_room(self) -> None:
        if self.followers >= MOST_FOLLOWERS:
            raise Busy(f"{MOST_FOLLOWERS} streams are open already, and no more are allowed: close some pages")

    def follow_run(self, identity: str, after: str | None) -> AsyncIterator[bytes]:
        """A stream of the run's events after this id; errors are raised before the stream begins."""
        self.check_room()
        run = run_documents.get_run(self.library, identity)
        place = Place.parse(after) if after else Place()
        if place is None:
            raise BadRequest(f"{(after or '')[:60]!r} is no event id: give an id that the server sent, or none")
        return self._one(Follower(run, place, self.status))

    async def _one(self, follower: Follower) -> AsyncIterator[bytes]:
        with self.following([follower.run.id]):
            while not self._closed:
                changed = self._changed  # before looking, so that nothing is missed in between
                written = await follower.next()
                if written:
                    self.events_sent += sum(len(one.events) for one in written)
                    yield b"".join(one.frames for one in written)
                if follower.ended:
                    return
                if not follower.has_more and not await _changes(changed):
                    yield b": .\n\n"

    def follow_list(self, follow: str = "") -> AsyncIterator[bytes]:
        """A stream of the list of runs, whenever it is another one, and of the events of some runs.

        `follow` is `id@place,id@place,...`; a place that is no event id means the beginning.
        """
        self.check_room()
        followers = {}
        for part in [part for part in follow.split(",") if part][:MOST_FOLLOWED]:
            identity, _, after = part.partition("@")
            run = self.library.get(identity)
            if run is not None:
                followers[identity] = Follower(run, Place.parse(after) or Place(), self.status)
        return self._several(list(followers.values()))

    async def _several(self, followers: list[Follower]) -> AsyncIterator[bytes]:
        with self.following([follower.run.id for follower in followers]):
            sent = b""
            while not self._closed:
                changed = self._changed
                parts = []
                if self._list and self._list != sent:
                    sent = self._list
                    parts.append(b"event: runs\ndata: " + sent + b"\n\n")
                for follower in followers:
                    written = [event for one in await follower.next() for event in one.events]
                    if written:
                        self.events_sent += len(written)
                        entries = b",".join(event.as_entry(follower.run.id) for event in written)
                        parts.append(b"event: run\ndata: [" + entries + b"]\n\n")
                if parts:
                    yield b"".join(parts)
                followers = [follower for follower in followers if not follower.ended]
                if not any(follower.has_more for follower in followers) and not await _changes(changed):
                    yield b": .\n\n"

    def status(self, run: Run) -> tuple[str, str | None]:
        return self._statuses.get(run.id) or run_documents.status_of(run)


class Follower:
    """A place in a run file, and what comes after it."""

    def __init__(self, run: Run, place: Place, status: Callable[[Run], tuple[str, str | None]]):
        self.run, self._place, self._status_of = run, place, status
        self._generation = run.generation
        self._status: tuple[str, str | None] | None = None
        self._resumes = self._unchecked = place.offset > 0
        self.ended = False
        self.has_more = False

    async def next(self) -> list[Written]:
        """The events to send now. `has_more` says whether to ask again at once, `ended` whether to ask no more."""
        self.has_more = False
        with self.run.blamed():
            return await self._next()
        return []

    async def _next(self) -> list[Written]:
        run = self.run
        if run.gone:
            return self._end("gone", "the run's folder was deleted")
        if self._unchecked:
            try:
                known = await asyncio.to_thread(run.is_known, self._place)
            except OSError:
                return []  # deleted, or not readable now: the next reading of the run tells
            if not known:
                return self._end("reset", run.reset_reason or "the run file is not the one that this id is of")
        self._unchecked = False
        if run.generation != self._generation:
            return self._end("reset", run.reset_reason)
        news = []
        if (status := self._status_of(run)) != self._status:
            self._status = status
            news.append(self._say("status", {"status": status[0], "status_reason": status[1]}))
        if self._resumes and run.state.place.offset - self._place.offset > FAR_BEHIND:
            return news + self._end("reset", "much was written since: load the curve anew") if run.is_read else news
        return news + await self._written()

    async def _written(self) -> list[Written]:
        recent = self.run.written_after(self._place.offset)
        if recent is None and self._place.offset < self.run.state.place.offset:
            try:
                recent = [await asyncio.to_thread(self.run.written_in_file, self._place)]
            except OSError:
                return []
            self.has_more = recent[0].end.offset > self._place.offset
        if recent:
            self._place = recent[-1].end
        return [one for one in recent or [] if one.events]

    def _say(self, name: str, data: dict[str, str | None]) -> Written:
        return Written(self._place.offset, self._place, [Sent.of(name, data)])

    def _end(self, name: str, reason: str) -> list[Written]:
        self.ended = True
        return [self._say(name, {"reason": reason})]


async def _changes(changed: asyncio.Event) -> bool:
    """Wait until something changes; False if nothing did for a while."""
    try:
        await asyncio.wait_for(changed.wait(), QUIET)
    except TimeoutError:
        return False
    return True
