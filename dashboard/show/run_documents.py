"""The documents `api/runs`, `api/runs/{id}` and `api/runs/{id}/series`."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

import numpy as np

from xsake.dashboard.read.library import Library
from xsake.dashboard.read.run import Run, date_of
from xsake.dashboard.read.run_events import number, plain
from xsake.dashboard.read.thinning import Points, fit
from xsake.dashboard.serve.problems import BadRequest, Gone, NotFound
from xsake.model.network.config import PRESETS

STALLED_AFTER = 30.0  # seconds without an event, or
STALLED_STEPS = 20  # times the median step, if that is longer
_DEAD_AFTER = 3.0  # seconds without an event, of a process that is not there
POINTS = (100, 2000, 20000)  # least, usual and most points of a series

# In the order in which they are shown: title, unit, and whether a logarithmic axis makes sense.
METRICS: dict[str, tuple[str, str | None, bool]] = {
    "loss": ("loss", "nats per token", True),
    "held_out_loss": ("held-out loss", "nats per token", True),
    "learning_rate": ("learning rate", None, True),
    "gradient_norm": ("gradient norm", None, True),
    "tokens_per_second": ("tokens per second", "tokens/s", True),
    "mfu": ("model FLOP/s utilisation", None, False),
    "seconds": ("time of a step", "s", True),
    "density": ("density, mean over layers and heads", None, False),
}


def get_run(library: Library, identity: str) -> Run:
    run = library.find(identity)
    if run is None:
        raise NotFound(f"there is no run {identity[:100]!r}; api/runs lists those there are")
    if run.gone:
        raise Gone(f"the run {run.name!r} is gone: its folder was deleted")
    return run


def runs(library: Library) -> dict[str, Any]:
    listed, skipped = [], []
    for run in library.runs:
        with run.lock:
            if run.gone or (run.problem is None and run.recorded and not run.state.start):
                continue
            empty = run.is_read and not run.state.events
            with run.blamed():
                if run.problem is None and not empty:
                    listed.append(summary(run))
            if run.problem is not None or empty:
                reason = run.problem or "the run file holds no event yet"
                skipped.append({"path": run.shown_path, "reason": reason})
    listed.sort(key=lambda one: (one["recorded"], -(one.pop("_sort")), one["id"]))
    return {"runs": listed, "skipped": skipped}


def run(library: Library, identity: str) -> dict[str, Any]:
    one = get_run(library, identity)
    one.update(most=1 << 20)
    with one.lock:
        state = one.state
        start = state.start
        document = summary(one)
        document.pop("_sort")
        environment = start.get("environment")
        known = [name for name in METRICS if name in state.curves]
        known += [name for name in state.curves if name not in METRICS]
        return document | {
            "config": plain(start.get("config")),
            "data": plain(start.get("data")),
            "command": start.get("command") if isinstance(start.get("command"), str) else None,
            "environment": plain(environment) if isinstance(environment, dict) else None,
            "metrics": [_metric(name, state.curves[name].count) for name in known],
            "resumed": list(state.resumed.all()),
            "recalibrated": list(state.recalibrated.all()),
            "densities": list(state.densities.all()),
            "last_id": str(state.place),
        }


def _metric(name: str, count: int) -> dict[str, Any]:
    title, unit, log = METRICS.get(name, (name.replace("_", " "), None, False))
    return {"name": name, "title": title, "unit": unit, "log": log, "points": count}


def summary(run: Run) -> dict[str, Any]:
    """The run's entry in the list; `_sort` is when it began."""
    state = run.state
    config = config_of(run)
    steps = _whole(config.get("steps"))
    per_step = tokens_per_step(run)
    status, reason = status_of(run)
    step_seconds = run.step_seconds()
    left = None if steps is None or step_seconds is None else max(steps - state.step, 0) * step_seconds
    held_out = state.curves.get("held_out_loss")
    densities = state.densities.last
    started = number(state.start.get("time"))
    return {
        "id": run.id,
        "name": run.name,
        "path": run.shown_path,
        "status": status,
        "status_reason": reason,
        "step": state.step,
        "steps": steps,
        "tokens": None if per_step is None else state.step * per_step,
        "tokens_per_step": per_step,
        "loss": number(state.last.get("loss")),
        "held_out_loss": None if held_out is None else float(held_out.points.value[-1]),
        "tokens_per_second": number(state.last.get("tokens_per_second")),
        "mfu": number(state.last.get("mfu")),
        "elapsed": round(state.seconds, 3),
        "remaining": 0.0 if status == "finished" else (round(left, 1) if left is not None else None),
        "attention": config.get("attention") if isinstance(config.get("attention"), str) else None,
        "density": number(config.get("density")),
        "kept_share": None if densities is None else float(np.mean([np.mean(row) for row in densities["layers"]])),
        "preset": preset_of(config),
        "started": date_of(started),
        "last_event": date_of(run.last_event()) if not run.recorded else None,
        "file_bytes": run.file_bytes,
        "read_share": run.read_share,
        "recorded": run.recorded,
        "_sort": started if started is not None else run.modified,
    }


def config_of(run: Run) -> dict[str, Any]:
    """The training configuration that the run file begins with; empty if there is none."""
    config = run.state.start.get("config")
    return config if isinstance(config, dict) else {}


def tokens_per_step(run: Run) -> int | None:
    length, batch = (_whole(config_of(run).get(name)) for name in ("length", "batch"))
    return None if length is None or batch is None else length * batch


_PRESETS = {name: dataclasses.asdict(preset) for name, preset in PRESETS.items()}


def preset_of(config: dict[str, Any]) -> str | None:
    model = config.get("model")
    return next((name for name, preset in _PRESETS.items() if preset == model), None)


def status_of(run: Run) -> tuple[str, str | None]:
    """The run's status, and why it has it."""
    state, steps = run.state, _whole(config_of(run).get("steps"))
    if state.failed is not None:
        return "failed", str(state.failed.get("reason") or "the run said that it failed")[:500]
    if (steps is not None and state.step >= steps) or run.recorded:
        return "finished", None
    age = run.age()
    usual = run.step_seconds() or 0.0
    alive = process_is_alive(state.process)
    if age > max(_DEAD_AFTER, 3 * usual) and alive is False:
        return "stalled", f"its process {state.process['pid']} has ended; the same command goes on"
    if alive and not run.stepped:
        return "running", "its first step is compiling"
    if age > max(STALLED_AFTER, STALLED_STEPS * usual):
        last = (date_of(run.last_event()) or "")[:16].replace("T", " ")
        return "stalled", f"no event since {last} UTC"
    return "running", None


def process_is_alive(process: Any) -> bool | None:
    """Whether the process that writes a run is there; None where that is not known, as on another host."""
    if not isinstance(process, dict) or process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if type(pid) is not int or not 0 < pid < 2**31:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def series(
    library: Library,
    identity: str,
    *,
    metrics: str | None = None,
    points: int = POINTS[1],
    first: int | None = None,
    last: int | None = None,
) -> dict[str, Any]:
    one = get_run(library, identity)
    if not POINTS[0] <= points <= POINTS[2]:
        raise BadRequest(f"points={points} must be from {POINTS[0]} to {POINTS[2]}")
    if first is not None and last is not None and first > last:
        raise BadRequest(f"from={first} must not be above to={last}")
    one.update(most=1 << 20)  # of a long file that was not read yet, the rest follows
    with one.lock:
        state = one.state
        wanted = list(state.curves) if metrics is None else [name for name in metrics.split(",") if name]
        if missing := [name for name in wanted if name not in state.curves]:
            raise BadRequest(f"no metric {missing[0][:100]!r}; the run has {', '.join(state.curves) or 'none yet'}")
        begin = 0 if first is None else max(first, 0)
        end = state.step if last is None else min(last, state.step)
        held = {name: state.curves[name] for name in wanted}
        place, read_share = str(state.place), one.read_share
    found = {name: curve.points.between(begin, end) for name, curve in held.items()}
    bucket = max((curve.bucket for curve in held.values()), default=1)
    if (first is not None or last is not None) and bucket > 1 and (finer := one.zoom(begin, end)) is not None:
        found |= {name: finer[name] for name in wanted if name in finer and len(finer[name]) > len(found[name])}
        bucket = 1
    thinned = {name: fit(value, points) for name, value in found.items()}
    return {
        "id": one.id,
        "tokens_per_step": tokens_per_step(one),
        "from": begin,
        "to": end,
        "bucket": max([bucket, *(size for _, size in thinned.values())]),
        "last_id": place,
        "read_share": read_share,
        "series": {name: as_lists(value) for name, (value, _) in thinned.items()},
    }


def as_lists(points: Points) -> dict[str, list[Any]]:
    return {
        "step": points.step.tolist(),
        "time": [round(value, 4) for value in points.time.tolist()],
        "value": [None if value != value else float(f"{value:.7g}") for value in points.value.tolist()],
    }


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
