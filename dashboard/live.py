"""Live: reads what runs write, a few times per second, and streams it to the browsers that follow.

A follower is a place in the run file, and nothing is queued for it: a browser that reads slowly is only further behind.
What was written last is in memory, formatted once for all followers; a follower from further back reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from xsake.dashboard import run_documents
from xsake.dashboard.library import Library
from xsake.dashboard.line_reader import Place
from xsake.dashboard.problems import BadRequest, Busy
from xsake.dashboard.run import Run
from xsake.dashboard.run_events import frame, to_json

EVERY = 0.25  # seconds between two readings of a followed run
SEARCH_EVERY = 2.0  # seconds between two searches for runs, and two readings of runs that nobody follows
QUIET = 15.0  # seconds after which a comment is sent, so that a dead connection is noticed
MOST_FOLLOWERS = 256
FAR_BEHIND = 8 << 20  # bytes: a follower that resumes from further back loads the curve anew


class Live:
    def __init__(self, library: Library):
        self.library = library
        self._followed: Counter[str] = Counter()
        self._streams = 0
        self._changed = asyncio.Event()
        self._statuses: dict[str, tuple[str, str | None]] = {}
        self._list = b""
        self.events_sent = 0

    @property
    def followers(self) -> int:
        return self._streams

    # -- reading ---------------------------------------------------------------------------------------------------

    async def read_forever(self) -> None:
        next_search = 0.0
        while True:
            began = time.monotonic()
            changed = await asyncio.to_thread(self._read_followed)
            if began >= next_search:
                changed = await asyncio.to_thread(self._read_all) or changed
                took = time.monotonic() - began
                next_search = time.monotonic() + max(SEARCH_EVERY, 10 * took)
            if changed:
                self.notify()
            behind = any(not run.is_read for run in self.library.runs if not run.gone and run.problem is None)
            if behind:
                next_search = 0.0
            await asyncio.sleep(0.005 if behind else EVERY)

    def _read_followed(self) -> bool:
        changed = False
        for identity in list(self._followed):
            run = self.library.get(identity)
            if run is None:
                continue
            changed = run.update() or changed
            with run.lock:
                status = run_documents.status_of(run)
            changed = changed or self._statuses.get(identity) != status
            self._statuses[identity] = status
        return changed

    def _read_all(self) -> bool:
        """Also makes the list of runs, for those who follow it."""
        self.library.search()
        self.library.update()
        listed = to_json(run_documents.runs(self.library))
        changed, self._list = listed != self._list, listed
        return changed

    def notify(self) -> None:
        """Wake all followers."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def wait(self, seconds: float) -> bool:
        """Until something changes; False if nothing did for so many seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    # -- following -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following(self, identity: str | None) -> Any:
        self._streams += 1
        if identity is not None:
            self._followed[identity] += 1
        try:
            yield
        finally:
            self._streams -= 1
            if identity is not None:
                self._followed[identity] -= 1
                self._followed += Counter()  # without those that nobody follows

    def check_room(self) -> None:
        if self._streams >= MOST_FOLLOWERS:
            raise Busy(f"{MOST_FOLLOWERS} streams are open already, and no more are allowed: close some pages")

    def follow_run(self, identity: str, after: str | None) -> AsyncIterator[bytes]:
        """A stream of the run's events after this id; errors are raised before the stream begins."""
        self.check_room()
        run = run_documents.get_run(self.library, identity)
        place = Place() if not after else Place.parse(after)
        if place is None:
            raise BadRequest(f"{(after or '')[:60]!r} is no event id: give an id that the server sent, or none")
        return self._follow(run, place, resumes=bool(after))

    async def _follow(self, run: Run, place: Place, *, resumes: bool) -> AsyncIterator[bytes]:
        with self.following(run.id):
            generation, status = run.generation, None
            if resumes and not await asyncio.to_thread(run.is_known, place):
                yield frame("reset", {"reason": run.reset_reason or "the run file is not the one that this id is of"})
                return
            while True:
                changed = self._changed  # before looking, so that nothing is missed in between
                if run.gone:
                    yield frame("gone", {"reason": "the run's folder was deleted"})
                    return
                if run.generation != generation:
                    yield frame("reset", {"reason": run.reset_reason})
                    return
                if (now := self._status(run)) != status:
                    status = now
                    yield frame("status", {"status": status[0], "status_reason": status[1]})
                if resumes and run.state.place.offset - place.offset > FAR_BEHIND:
                    if not run.is_read:
                        await asyncio.sleep(1)
                        continue
                    yield frame("reset", {"reason": "much was written since: load the curve anew"})
                    return
                data, place, ended = await self._next(run, place)
                if data:
                    self.events_sent += data.count(b"\n\n")
                    yield data
                if not ended:
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), QUIET)
                except TimeoutError:
                    yield b": .\n\n"

    def _status(self, run: Run) -> tuple[str, str | None]:
        return self._statuses.get(run.id) or run_documents.status_of(run)

    async def _next(self, run: Run, place: Place) -> tuple[bytes, Place, bool]:
        """Events from a place on, the place after them, and whether there are no more for now."""
        recent = run.frames_after(place.offset)
        if recent:
            return b"".join(one.data for one in recent), recent[-1].end, True
        if recent is not None or place.offset >= run.state.place.offset:
            return b"", place, True
        try:
            frames = await asyncio.to_thread(run.frames_from_file, place)
        except OSError:
            return b"", place, True  # deleted, or not readable: the next reading tells
        return frames.data, frames.end, frames.end.offset == place.offset

    def follow_list(self) -> AsyncIterator[bytes]:
        """A stream of the list of runs, sent whenever it is another one."""
        self.check_room()
        return self._changes(lambda: self._list, "runs")

    async def _changes(self, document: Callable[[], bytes], name: str) -> AsyncIterator[bytes]:
        with self.following(None):
            sent = b""
            while True:
                changed = self._changed
                now = document()
                if now and now != sent:
                    sent = now
                    yield b"event: " + name.encode() + b"\ndata: " + now + b"\n\n"
                try:
                    await asyncio.wait_for(changed.wait(), QUIET)
                except TimeoutError:
                    yield b": .\n\n"
