"""A worker process that may hang, crash or poison its device without taking its parent with it.

The parent never touches the device: the parent sends a request and waits for the reply, at most `limit` seconds. After
that the parent kills the worker and starts a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from xsake._measure import environment
from xsake._measure.environment import Facts
from xsake._op import registry

_START = 180.0  # seconds for a new process to import everything and to find its device


class Failed(Exception):
    """The request failed. The worker, or a new worker, accepts the next request."""


class Raised(Failed):
    """The request raised an exception; the text names its type and message."""


class Hung(Failed):
    """The worker did not answer within the limit, and was killed."""


class Died(Failed):
    """The worker process ended by itself."""


def reason(failed: Failed) -> str:
    """Why a request failed, in one line. Errors that were raised to be read are shown without their type."""
    told = " ".join(str(failed).split())
    for kind in ("ModuleNotFoundError", "NotImplementedError", "ValueError"):
        told = told.removeprefix(f"{kind}: ")
    return told[:300]


class Service:
    """The object in the worker's process that does the work: a request calls one of its methods by name."""

    def facts(self) -> Facts:
        return environment.facts()

    def healthy(self) -> bool:
        """Whether the device still answers after a request that raised an exception; if not, the worker is replaced.

        After some errors of a kernel, every later call of the process fails.
        """
        try:
            return int(jnp.arange(3).sum()) == 3
        except Exception:
            return False

    def close(self) -> None:
        """End what the object has started."""


@runtime_checkable
class Caller(Protocol):
    """The interface of `Worker` and `InProcess`."""

    restarts: int
    own_process: bool

    def call(self, method: str, *arguments: Any, limit: float) -> Any: ...

    def close(self) -> None: ...


class InProcess:
    """A `Worker` without a process of its own, for a debugger: nothing is killed, and limits do not hold."""

    restarts, own_process = 0, False

    def __init__(self, factory: Callable[[], Service]):
        self._service = factory()

    def call(self, method: str, *arguments: Any, limit: float) -> Any:
        try:
            return getattr(self._service, method)(*arguments)
        except Exception as error:
            raise Raised(_told(error)) from error

    def close(self) -> None:
        self._service.close()


class Worker:
    """A process that serves requests. `factory` makes the `Service` in that process and must be importable there.

    The process knows the backends that are registered here (`xsake.register_backend`).

    `restarts` counts the processes before the current one: everything prepared in them is lost.
    """

    own_process = True

    def __init__(self, factory: Callable[[], Service]):
        self._factory, self.restarts, self._ready = factory, 0, False
        self._start()

    def call(self, method: str, *arguments: Any, limit: float) -> Any:
        """The result of the method. Raises `Failed` if the method fails or takes more than `limit` seconds."""
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
            raise Died(f"the process ended during {method} with exit code {code}{_signal(code)}{said}") from None
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
        _remove(self._errors.name)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._errors = tempfile.NamedTemporaryFile(  # noqa: SIM115 closed in close
            "r", prefix="xsake-worker-", suffix=".log", delete=False, errors="replace"
        )
        given = (theirs, self._factory, self._errors.name, registry.registrations())
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        self._ready = False
        theirs.close()

    def _restart(self) -> None:
        self.close()
        self.restarts += 1
        self._start()

    def _last_words(self) -> str:
        """The last lines that the process wrote to stderr, where a crash in C++ gives its reason."""
        lines = self._errors.read().strip().splitlines()
        return f": {' | '.join(lines[-3:])}" if lines else ""


def _signal(code: int | None) -> str:
    """The name of the signal that ended a process, such as SIGSEGV."""
    try:
        return f" ({signal.Signals(-(code or 0)).name})"
    except ValueError:
        return ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _serve(
    pipe: multiprocessing.connection.Connection,
    factory: Callable[[], Service],
    errors: str,
    backends: list[tuple[str, str, str | None]],
) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    _remove(errors)  # a parent that is killed could not
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Only now may this process have workers of its own: they end with it, as it ends with its parent.
    multiprocessing.current_process().daemon = False
    for name, module, before in backends:
        registry.register_backend(name, module, before=before)
    service = factory()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            try:
                reply = ("result", getattr(service, method)(*arguments))
            except Exception as error:
                reply = ("raised" if service.healthy() else "poisoned", _told(error))
            pipe.send(reply)
    service.close()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


def _end_with_parent() -> None:
    """End with the parent: otherwise a hanging worker would hold the device after its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
