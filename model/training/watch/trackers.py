"""Experiment trackers: Weights & Biases, TensorBoard and Trackio, behind one small interface.

A tracker never stops a run: without a key Weights & Biases logs to the run folder, and a tracker that fails is told of
once and left out from then on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import urllib.parse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
PROJECT = "xsake"


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError if a tracker is unknown or not installed."""
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"track={name!r} must be one of {', '.join(PACKAGES)}")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ValueError(
                f"track={name!r} needs {PACKAGES[name]}, which is not installed: pip install {PACKAGES[name]}"
            )


class Trackers:
    """The trackers of a run. Each event goes to all of them, and none can stop the run."""

    def __init__(self, names: Sequence[str], run: Path, config: dict[str, Any], *, start: int):
        self._open: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            with self._left_out_on_error(name):
                self._open[name] = _MAKERS[name](run, config, start)

    def log(self, values: dict[str, Any], step: int) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        for name, tracker in list(self._open.items()):
            with self._left_out_on_error(name):
                tracker.log(numbers, step)

    @contextlib.contextmanager
    def _left_out_on_error(self, name: str) -> Any:
        try:
            yield
        except Exception as error:  # trackers raise what they like: no network, a full disk, ...
            self._open.pop(name, None)
            line = str(error).partition("\n")[0] or type(error).__name__
            warnings.warn(f"{name} is left out, and training goes on: {line}", stacklevel=3)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: Any) -> None:
        for name, tracker in list(self._open.items()):
            with self._left_out_on_error(name):
                tracker.close()


class _OfRun:
    """A tracker whose library has an object for the run."""

    _run: Any

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _WeightsAndBiases(_OfRun):
    def __init__(self, run: Path, config: dict[str, Any], start: int):
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _wandb_key():
            mode = "offline"
            warnings.warn(
                f"wandb has no key: events go to {run / 'wandb'}, from where `wandb sync` sends them (`wandb login` "
                "sets a key)",
                stacklevel=6,
            )
        about: dict[str, Any] = dict(project=PROJECT, name=run.name, dir=str(run), config=config, mode=mode)
        try:
            self._run = wandb.init(**about, resume="allow" if start else None)
        except wandb.errors.CommError as error:
            warnings.warn(f"wandb cannot be reached ({error}): events go to {run / 'wandb'}", stacklevel=6)
            self._run = wandb.init(**about | {"mode": "offline"})


def _wandb_key() -> bool:
    """Whether wandb has a key: in the environment, or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class _TensorBoard:
    def __init__(self, run: Path, config: dict[str, Any], start: int):
        import json

        from tensorboardX import SummaryWriter

        # Events that a killed run wrote after its checkpoint are taken back.
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1 if start else None)
        if not start:
            self._writer.add_text("config", json.dumps(config, indent=1), 0)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio(_OfRun):
    def __init__(self, run: Path, config: dict[str, Any], start: int):
        import trackio

        self._run = trackio.init(project=PROJECT, name=run.name, config=config, resume="allow" if start else "never")


_MAKERS: dict[str, Callable[[Path, dict[str, Any], int], Tracker]] = {
    "wandb": _WeightsAndBiases,
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
}
