"""Texts that users paste: a bounded queue, one worker process that keeps the model, and progress for the page.

The server itself never imports JAX: the worker does, and may be killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from xsake._ground.extras import missing
from xsake._ground.fields import check
from xsake._ground.kinds import TEXT, list_of, maybe, number, whole
from xsake.dashboard.read.run_events import frame
from xsake.dashboard.serve.problems import BadRequest, Busy, NotFound, TooLarge, Unavailable
from xsake.dashboard.show.documents import Documents

MOST_TEXT = 1_000_000  # bytes of UTF-8
MOST_WAITING = 4
MOST_KEPT = 8  # recordings of texts, in memory
IDLE = 300.0  # seconds after which the worker ends, and its memory with it
LIMIT = 1800.0  # seconds that one text may take
LENGTHS = (1024, 8192)  # tokens
LENGTH = 2048
METHODS = ("hads", "x_attention_8", "sink_window", "mean_top_k", "flash_prefill", "oracle_gain")
_BODY = {
    "text": TEXT,
    "length": whole(*LENGTHS),
    "budgets": maybe(list_of(number(above=0, most=1))),
    "methods": list_of(TEXT),
}
_LONGEST_ANSWER = 128 << 20
_NEEDED = ("flax", "gguf", "safetensors", "tokenizers")  # of the extra `model`


@dataclasses.dataclass
class Job:
    id: str
    text: str
    length: int
    budgets: list[float] | None
    methods: list[str]
    state: str = "queued"  # "queued", "running", "done" or "failed"
    stage: str = "waiting"
    done: int = 0
    of: int = 0
    error: str | None = None
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def tell(self, **news: Any) -> None:
        for name, value in news.items():
            setattr(self, name, value)
        before, self.changed = self.changed, asyncio.Event()
        before.set()


class Texts:
    """The queue. `model` is a published model's name, or a model file; `profile` a HADS profile, if not the shipped."""

    def __init__(self, documents: Documents, *, model: str = "smollm2", profile: Path | None = None):
        self._documents, self._model, self._profile = documents, model, profile
        self._jobs: dict[str, Job] = {}
        self._waiting: asyncio.Queue[Job] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._running: Job | None = None
        self._closed = False

    def close(self) -> None:
        """End all streams: the server stops."""
        self._closed = True
        for job in self._jobs.values():
            job.tell()

    def unavailable(self) -> str | None:
        """Why no text can be computed here, or None."""
        if lacking := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            return missing(lacking[0], "model")
        from xsake.model.weights import fetch

        if self._model in fetch.PUBLISHED and not fetch.place(self._model).exists():
            return f"{self._model} is not here yet: run `xsake model fetch {self._model}`"
        return self.wrong()

    def wrong(self) -> str | None:
        """Why no text can ever be computed with this model and this profile, or None."""
        from xsake.model.weights import fetch

        if self._model not in fetch.PUBLISHED:
            if not Path(self._model).exists():
                return f"{self._model} is no file, and no published model ({', '.join(fetch.PUBLISHED)})"
            if self._profile is None:
                return f"{self._model} has no shipped profile: calibrate it, and start with --profile FILE"
        if self._profile is not None and not self._profile.is_file():
            return f"{self._profile} is no file: --profile takes what `xsake calibrate` wrote"
        return None

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, body: Any) -> dict[str, Any]:
        if reason := self.unavailable():
            raise Unavailable(reason)
        job = _check(body)
        waiting = [one for one in self._jobs.values() if one.state == "queued"]
        if len(waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} texts wait already: try again when one of them is done")
        self._jobs[job.id] = job
        self._waiting.put_nowait(job)
        return {"id": job.id, "position": len(waiting) + (self._running is not None)}

    def _job(self, identity: str) -> Job:
        if identity not in self._jobs:
            raise NotFound(f"there is no text {identity[:100]!r}; the last {MOST_KEPT} are kept until the server ends")
        return self._jobs[identity]

    def document(self, identity: str) -> dict[str, Any]:
        job = self._job(identity)
        waiting = [one.id for one in self._jobs.values() if one.state == "queued"]
        about = {name: getattr(job, name) for name in ("id", "state", "stage", "done", "of", "error")}
        position = waiting.index(job.id) + (self._running is not None) if job.id in waiting else 0
        return about | {"position": position, "recording": job.id if job.state == "done" else None}

    async def cancel(self, identity: str) -> dict[str, Any]:
        job = self._job(identity)
        if job.state in ("queued", "running"):
            was_running = job is self._running
            job.tell(state="failed", error="cancelled")
            if was_running:
                await self._stop()
        return self.document(identity)

    def follow(self, identity: str) -> AsyncIterator[bytes]:
        return self._follow(self._job(identity))

    async def _follow(self, job: Job) -> AsyncIterator[bytes]:
        while True:
            changed = job.changed
            yield frame("progress", self.document(job.id))
            if self._closed or job.state in ("done", "failed"):
                return
            while True:
                try:
                    await asyncio.wait_for(changed.wait(), 15)
                    break
                except TimeoutError:
                    yield b": .\n\n"

    # -- work ------------------------------------------------------------------------------------------------------

    async def work_forever(self) -> None:
        try:
            while True:
                try:
                    job = await asyncio.wait_for(self._waiting.get(), IDLE if self._process else None)
                except TimeoutError:
                    await self._stop()
                    continue
                if job.state != "queued":
                    continue  # cancelled meanwhile
                self._running = job
                job.tell(state="running", stage="loading the model")
                try:
                    await asyncio.wait_for(self._compute(job), LIMIT)
                except TimeoutError:
                    job.tell(state="failed", error=f"it took longer than {LIMIT:.0f} s")
                    await self._stop()
                except Exception as error:
                    job.tell(state="failed", error=f"{type(error).__name__}: {error}"[:500])
                    await self._stop()
                finally:
                    self._running = None
                    self._forget_old()
        finally:
            await self._stop()

    async def _compute(self, job: Job) -> None:
        process = self._process if self._process and self._process.returncode is None else await self._start()
        assert process.stdin is not None and process.stdout is not None
        order = {"id": job.id, "text": job.text, "length": job.length, "budgets": job.budgets, "methods": job.methods}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        while line := await process.stdout.readline():
            answer = json.loads(line)
            if job.state != "running":
                return  # cancelled, and the process killed
            if "recording" in answer:
                self._documents.own_recordings[job.id] = answer["recording"]
                job.tell(state="done", stage="done", done=job.of)
                return
            if "error" in answer:
                job.tell(state="failed", error=answer["error"])
                return
            job.tell(stage=answer["stage"], done=answer["done"], of=answer["of"])
        if job.state == "running":
            code = await process.wait()
            await self._stop()
            job.tell(
                state="failed", error=f"the worker ended with code {code}; the text may need more memory than there is"
            )

    async def _start(self) -> asyncio.subprocess.Process:
        words = [sys.executable, "-m", "xsake.dashboard.serve.own_text_worker", self._model]
        words += [str(self._profile)] if self._profile else []
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST_ANSWER,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        return self._process

    async def _stop(self) -> None:
        """End the worker, and wait until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    def _forget_old(self) -> None:
        over = [job for job in self._jobs.values() if job.state in ("done", "failed")][:-MOST_KEPT]
        for job in over:
            del self._jobs[job.id]
            self._documents.own_recordings.pop(job.id, None)


def _check(body: Any) -> Job:
    """A job from what was posted."""
    if not isinstance(body, dict):
        raise BadRequest('the body must be an object such as {"text": "..."}')
    if unknown := sorted(set(body) - set(_BODY)):
        raise BadRequest(f"unknown {str(unknown[0])[:60]!r}; allowed are text, length, budgets and methods")
    given: dict[str, Any] = {"text": "", "length": LENGTH, "budgets": None, "methods": list(METHODS)} | body
    try:
        for name, kind in _BODY.items():
            check(name, given[name], kind)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    text, length, budgets, methods = (given[name] for name in _BODY)
    if not text.strip():
        raise BadRequest("text must be a string that is not empty")
    if (size := len(text.encode("utf-8", "replace"))) > MOST_TEXT:
        raise TooLarge(f"the text has {size:,} bytes, and at most {MOST_TEXT:,} are read: paste a part of it")
    if budgets is not None:
        if not 1 <= len(budgets) <= 8:
            raise BadRequest("budgets must be up to 8 shares of the blocks, above 0 and at most 1")
        budgets = sorted(set(map(float, budgets)))
    if not 1 <= len(methods) <= 12:
        raise BadRequest(f"methods must be names such as {', '.join(METHODS)}")
    if "hads" not in methods:
        methods = ["hads", *methods]
    return Job(f"t-{secrets.token_hex(4)}", text, length, budgets, list(dict.fromkeys(methods)))
