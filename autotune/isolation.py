"""A worker process that may hang, crash or poison its device without taking the tuner with it.

The parent never touches the device: it asks, waits so long, and otherwise kills the worker and starts another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

_START = 180.0  # seconds for a new process to import everything and to find its device


class Failed(Exception):
    """The request did not succeed; the worker (or a new one) takes the next."""


class Raised(Failed):
    """It raised, as the text says."""


class Hung(Failed):
    """It was killed after its time was over."""


class Died(Failed):
    """The process ended by itself."""


@runtime_checkable
class Hands(Protocol):
    """What does the work: an object whose methods are called by name, made in the worker."""

    def healthy(self) -> bool: ...


@runtime_checkable
class Caller(Protocol):
    """`Worker` or `Here`."""

    restarts: int

    def call(self, method: str, *arguments: Any, limit: float) -> Any: ...

    def close(self) -> None: ...


class Here:
    """The same in this process, for a debugger: nothing is killed, and limits do not hold."""

    restarts = 0

    def __init__(self, factory: Callable[[], Hands]):
        self._hands = factory()

    def call(self, method: str, *arguments: Any, limit: float) -> Any:
        try:
            return getattr(self._hands, method)(*arguments)
        except Exception as error:
            raise Raised(_told(error)) from error

    def close(self) -> None:
        pass


class Worker:
    """`factory` makes the hands in the new process and must be importable there.

    `restarts` counts the processes before this one: what was prepared in them is gone.
    """

    def __init__(self, factory: Callable[[], Hands]):
        self._factory, self.restarts, self._ready = factory, 0, False
        self._start()

    def call(self, method: str, *arguments: Any, limit: float) -> Any:
        """The result, or a `Failed`; `limit` in seconds."""
        try:
            if not self._ready:
                if not self._pipe.poll(_START):
                    self._restart()
                    raise Hung(f"the new process was not ready within {_START:g} s")
                self._pipe.recv()
                self._ready = True
            self._pipe.send((method, arguments))
            if not self._pipe.poll(limit):
                self._restart()
                raise Hung(f"{method} did not end within {limit:g} s")
            kind, result = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            code, said = self._process.exitcode, self._last_words()
            self._restart()
            raise Died(f"the process ended during {method} with exit code {code}{said}") from None
        if kind == "result":
            return result
        if kind == "poisoned":
            self._restart()
        raise Raised(result)

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()
        self._errors.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._errors = tempfile.NamedTemporaryFile(prefix="xsake-worker-", suffix=".log")  # noqa: SIM115 closed in close
        self._process = context.Process(target=_serve, args=(theirs, self._factory, self._errors.name), daemon=True)
        self._process.start()
        self._ready = False
        theirs.close()

    def _restart(self) -> None:
        self.close()
        self.restarts += 1
        self._start()

    def _last_words(self) -> str:
        """The end of what it wrote to stderr: a crash in C++ speaks there."""
        with open(self._errors.name, errors="replace") as file:
            lines = file.read().strip().splitlines()
        return f": {' | '.join(lines[-3:])}" if lines else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _serve(pipe: multiprocessing.connection.Connection, factory: Callable[[], Hands], errors: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hands = factory()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            try:
                reply = ("result", getattr(hands, method)(*arguments))
            except Exception as error:
                reply = ("raised" if hands.healthy() else "poisoned", _told(error))
            pipe.send(reply)


def _end_with_parent() -> None:
    """A worker that hangs would otherwise hold the device after its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
