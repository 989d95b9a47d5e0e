"""A dashboard for tests: run files by hand, and the server in a thread of this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from xsake.dashboard.read.library import Given, Library
from xsake.dashboard.serve.app import make_app
from xsake.dashboard.serve.server import Server
from xsake.dashboard.show.documents import Documents
from xsake.dashboard.show.tuning_documents import Tuning

CONFIG = {"length": 64, "batch": 4, "steps": 100, "attention": "hads", "density": 0.43}


def step_line(step: int, **values: Any) -> str:
    metrics = {"loss": 5 - step / 100, "gradient_norm": 1.0, "learning_rate": 1e-3, "seconds": 0.5}
    return (
        json.dumps({"event": "step", "step": step, **metrics, "tokens_per_second": 512.0, "mfu": None} | values) + "\n"
    )


def write_run(folder: Path, steps: int, **start: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "metrics.jsonl"
    first = {"event": "start", "step": 0, "config": CONFIG, "time": time.time()} | start
    file.write_text(json.dumps(first) + "\n" + "".join(step_line(step) for step in range(1, steps + 1)))
    return file


def append(file: Path, text: str) -> None:
    with open(file, "a") as opened:
        opened.write(text)


def library_of(path: Path) -> Library:
    """The runs in a folder, or one run file, read."""
    library = Library([Given.of(path)])
    library.search()
    library.update()
    return library


def documents(folder: Path, records: Path | None = None, storages: list[Any] | None = None) -> Documents:
    return Documents(library=Library([Given.of(folder)]), tuning=Tuning(storages or [], {}), records=records)


@contextlib.contextmanager
def serving(shown: Documents, **options: Any) -> Iterator[httpx.Client]:
    """A client of a running server."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # from now on clients wait until the server answers, rather than being refused
    # Not uvloop, where it is installed: it forks to start a process, and JAX is loaded here.
    server = Server(make_app(shown, **options), loop="asyncio")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


class Stream:
    """Events of a `text/event-stream`, one at a time."""

    def __init__(self, response: httpx.Response):
        self._lines = response.iter_lines()

    def next(self) -> dict[str, Any]:
        event: dict[str, Any] = {}
        for line in self._lines:
            if not line and event:
                return event
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = json.loads(value) if name == "data" else value
        raise AssertionError("the stream ended")

    def take(self, count: int, name: str = "step") -> list[dict[str, Any]]:
        """The next `count` events of this name; others are passed over."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            event = self.next()
            if event["event"] == name:
                found.append(event)
        return found


@contextlib.contextmanager
def following(client: httpx.Client, path: str, **headers: str) -> Iterator[Stream]:
    with client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)
