"""The documents `api/tuning`, `api/tuning/studies/{id}` and `api/tuning/databases/{id}`."""

from __future__ import annotations

import datetime
import hashlib
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xsake import tuning_db
from xsake.dashboard.read.library import find_files
from xsake.dashboard.read.run_events import number, plain
from xsake.dashboard.read.study_reader import Unreadable, studies_of
from xsake.dashboard.serve.problems import NotFound

FASTER = 1.05  # a speed-up from which on an entry counts as a gain, as in the tuner's report
MOST_TRIALS = 5000
_SHOWN_URL = re.compile(r"://([^/@:]*):[^/@]*@")


def check_storage(storage: str | Path) -> None:
    """Raise ValueError if there is no such storage of studies, or it cannot be read."""
    if isinstance(storage, Path) and not storage.is_file():
        raise ValueError(f"{storage} is no file: --storage takes a journal file, or a URL such as sqlite:///FILE")
    try:
        studies_of(storage)
    except (Unreadable, OSError) as error:
        raise ValueError(f"{_shown(storage)}: {error}") from error


def _shown(storage: str | Path) -> str:
    """A file without its folder, a URL without its password."""
    return storage.name if isinstance(storage, Path) else _SHOWN_URL.sub(r"://\1:***@", storage)


class Tuning:
    """Studies of some storages, and the tuning databases of some folders."""

    def __init__(self, storages: list[str | Path], folders: dict[str, Path], *, search: Sequence[Path] = ()):
        """`search`: folders in which journals are looked for, each time anew."""
        self._given, self._folders, self._search = storages, folders, search
        self._lock = threading.Lock()
        self._held: dict[Path, tuple[Any, Any]] = {}  # what was read, with the version of its file

    # -- studies ---------------------------------------------------------------------------------------------------

    def _storages(self) -> dict[str | Path, str]:
        """Every storage, and how it is shown: a file that was found without the folder that was searched."""
        shown = {storage: _shown(storage) for storage in self._given}
        found = {path: str(path.relative_to(root)) for root in self._search for path in find_files(root, ".journal")}
        return found | shown

    def _studies(self) -> tuple[dict[str, tuple[dict[str, Any], list[Any]]], list[dict[str, str]]]:
        found, skipped = {}, []
        for storage, shown in self._storages().items():
            try:
                studies = self._read(storage, studies_of) if isinstance(storage, Path) else studies_of(storage)
            except FileNotFoundError:
                continue
            except (Unreadable, OSError) as error:
                skipped.append({"path": shown, "reason": str(error)})
                continue
            for name, trials in studies:
                identity = hashlib.sha256(f"{shown}\0{name}".encode()).hexdigest()[:12]
                try:
                    found[identity] = (_study_entry(identity, name, shown, trials), trials)
                except Exception as error:  # such as a study of several objectives: the others are shown all the same
                    skipped.append({"path": f"{shown}: {name}", "reason": f"{type(error).__name__}: {error}"[:300]})
        return found, skipped

    def _read(self, path: Path, read: Callable[[Path], Any]) -> Any:
        """The contents of a journal or a database, read again only when its file changed."""
        about = path.stat()
        version = (about.st_ino, about.st_size, about.st_mtime_ns)
        with self._lock:
            if path not in self._held or self._held[path][0] != version:
                self._held[path] = version, read(path)
            return self._held[path][1]

    # -- documents -------------------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        studies, skipped = self._studies()
        databases, broken = self._databases()
        entries = sorted((entry for entry, _ in studies.values()), key=lambda e: e["updated"] or "", reverse=True)
        files = [storage for storage in self._storages() if isinstance(storage, Path) and storage.exists()]
        command = None
        if entries:
            command = f"optuna-dashboard {files[0].name}" if files else "optuna-dashboard STORAGE_URL"
        return {
            "studies": entries,
            "skipped": skipped + broken,
            "optuna_dashboard": command,
            "databases": [_database_entry(*one) for one in databases],
        }

    def study(self, identity: str) -> dict[str, Any]:
        studies, _ = self._studies()
        if identity not in studies:
            raise NotFound(f"there is no study {identity[:100]!r}; api/tuning lists those there are")
        entry, trials = studies[identity]
        default = _config(trials[0]) if trials else None  # the heuristic's configuration is always tried first
        rows = [_trial(trial) | {"is_default": _config(trial) == default} for trial in trials[:MOST_TRIALS]]
        best, improved = math.inf, []
        for row in rows:
            if row["state"] == "complete" and row["value"] is not None and row["value"] < best:
                best = row["value"]
                improved.append([row["number"], best])
        return entry | {"trials_list": rows, "best_so_far": improved}

    def database(self, identity: str) -> dict[str, Any]:
        for one in self._databases()[0]:
            if one[0] == identity:
                database = one[3]
                rows = [_entry(entry) for entry in database.entries]
                return _database_entry(*one) | {"rows": rows, "environments": plain(database.environments)}
        raise NotFound(f"there is no tuning database {identity[:100]!r}; api/tuning lists those there are")

    def _databases(self) -> tuple[list[tuple[str, str, Path, Any]], list[dict[str, str]]]:
        """(id, origin, path, database) of every readable file, and the reason for each other file."""
        found, broken = [], []
        for origin, folder in self._folders.items():
            for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
                if path.name == "schema.json":
                    continue
                try:
                    database = self._read(path, tuning_db.Database.read)
                except (OSError, ValueError) as error:
                    broken.append({"path": path.name, "reason": str(error)[:300]})
                    continue
                found.append((f"{origin}-{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)}", origin, path, database))
        return found, broken


def _study_entry(identity: str, name: str, storage: str, trials: list[Any]) -> dict[str, Any]:
    device, _, rest = name.partition(" | ")
    title = rest.split(" | ")[0] or name
    states = Counter(_state(trial) for trial in trials)
    complete = [t for t in trials if _state(t) == "complete" and number(t.value) is not None]
    best = min(complete, key=lambda t: t.value, default=None)
    ends = [t.datetime_complete or t.datetime_start for t in trials if t.datetime_complete or t.datetime_start]
    direction = re.search(r"attention (\w+) on", title)
    return {
        "id": identity,
        "name": name,
        "storage": storage,
        "device": device if rest else None,
        "title": title,
        "direction": direction[1] if direction else None,
        "trials": len(trials) - states["infeasible"] - states["waiting"],
        **{state: states[state] for state in ("complete", "slower", "failed", "wrong", "running")},
        "best": None if best is None else best.value,
        "best_config": None if best is None else _config(best),
        "updated": _date(max(ends)) if ends else None,
    }


def _state(trial: Any) -> str:
    """How a trial ended; `xsake.autotune` notes it in the trial's attribute `end`."""
    end = trial.user_attrs.get("end")
    state = trial.state.name
    if state in ("RUNNING", "WAITING"):
        return state.lower()
    if end in ("complete", "slower", "failed", "wrong"):
        return "abandoned" if end == "complete" and trial.value is None else end
    if state == "COMPLETE":
        return "complete"
    if state == "PRUNED":  # a draw that was in no list, or was tried: in studies with a parameter per field
        return "infeasible" if trial.user_attrs.get("reason") in ("tried already", "infeasible") else "slower"
    return "abandoned"


def _date(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).isoformat(timespec="seconds")


def _config(trial: Any) -> Any:
    part = trial.user_attrs.get("part")
    return plain(part if isinstance(part, dict) else dict(trial.params))


def _trial(trial: Any) -> dict[str, Any]:
    reason = trial.user_attrs.get("reason")
    took = trial.datetime_complete - trial.datetime_start if trial.datetime_complete and trial.datetime_start else None
    return {
        "number": trial.number,
        "state": _state(trial),
        "value": number(trial.value),
        "config": _config(trial),
        "reason": reason if isinstance(reason, str) else None,
        "rounds": [number(value) for _, value in sorted(trial.intermediate_values.items())][:100],
        "started": _date(trial.datetime_start) if trial.datetime_start else None,
        "seconds": None if took is None else round(took.total_seconds(), 3),
    }


def _database_entry(identity: str, origin: str, path: Path, database: Any) -> dict[str, Any]:
    configurations = [entry for entry in database.entries if entry.key.operation != tuning_db.HADS]
    gains = [gain for entry in configurations if (gain := number(entry.about.get("speedup"))) and gain > 0]
    return {
        "id": identity,
        "device": database.device_kind,
        "origin": origin,
        "path": path.name,
        "entries": len(database),
        "gain": {
            "best": max(gains, default=None),
            "geometric_mean": round(math.exp(sum(map(math.log, gains)) / len(gains)), 4) if gains else None,
            "faster": sum(gain >= FASTER for gain in gains),
        },
    }


def _entry(entry: Any) -> dict[str, Any]:
    key, about = entry.key, entry.about
    heads = f"{key.heads} heads in groups of {key.group}" if key.group > 1 else f"{key.heads} heads"
    dims = f"{key.head_dim}" if key.head_dim == key.value_dim else f"{key.head_dim}/{key.value_dim}"
    causal = ", causal" if key.causal else ""
    measured = about.get("measured")
    return {
        "direction": key.direction,
        "implementation": key.implementation,
        "dtype": key.dtype,
        "call": f"{key.q_len} x {key.kv_len}, {heads}, D {dims}, blocks {key.block_q} x {key.block_kv}{causal}",
        "density": key.density,
        "config": plain(dict(entry.config)),
        "source": about.get("source"),
        "speedup": number(about.get("speedup")),
        "date": about.get("date"),
        "kernel": about.get("kernel"),
        "environment": about.get("environment"),
        "measured": [_measured(one) for one in measured] if isinstance(measured, list) else None,
        "cycles": plain(about.get("cycles")),
        "trials": plain(about.get("trials")),
    }


def _measured(one: Any) -> dict[str, Any]:
    def seconds(timing: Any) -> dict[str, Any]:
        timing = timing if isinstance(timing, dict) else {}
        values = {name: number(timing.get(name)) for name in ("median", "low", "high")}
        return {name: None if us is None else round(us / 1e6, 9) for name, us in values.items()} | {
            "rounds": timing.get("rounds")
        }

    one = one if isinstance(one, dict) else {}
    return {
        "workload": one.get("workload"),
        "density": number(one.get("density")),
        "default": seconds(one.get("default")),
        "tuned": seconds(one.get("tuned")),
    }
