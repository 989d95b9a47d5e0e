"""Optuna studies, read and never written: the trials of a journal file or of a database that Optuna opens."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from xsake._ground.extras import missing
from xsake.dashboard.read.inside import read_inside

MOST_JOURNAL = 256 << 20  # bytes


class Unreadable(ValueError):
    """The storage cannot be read; the message says why."""


def studies_of(where: str | Path) -> list[tuple[str, list[Any]]]:
    """(name, Optuna's frozen trials) of every study of a storage: a journal file, or a URL."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise Unreadable(missing("optuna", "tune")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = _open(where)
        return [
            (study.study_name, storage.get_all_trials(study._study_id, deepcopy=False))
            for study in storage.get_all_studies()
        ]
    except Unreadable:
        raise
    except Exception as error:  # a damaged journal or a driver raises errors of its own
        line = str(error).partition("\n")[0] or type(error).__name__
        raise Unreadable(f"the studies cannot be read: {line[:300]}") from error


def _open(where: str | Path) -> Any:
    from optuna.storages import RDBStorage
    from optuna.storages.journal import JournalStorage

    if isinstance(where, Path):
        return JournalStorage(_journal(where))
    if where.startswith("sqlite:///"):
        path = Path(where.removeprefix("sqlite:///"))
        if not path.is_file():
            raise Unreadable(f"{path} is not there")
        where = f"sqlite:///file:{path.resolve()}?mode=ro&uri=true"
    return RDBStorage(where, skip_table_creation=True)


def _journal(path: Path) -> Any:
    """A backend of Optuna's that holds the journal's whole records, and refuses to write."""
    from optuna.storages.journal import BaseJournalBackend

    root = path.parent.resolve()
    data = read_inside(root, root / path.name, MOST_JOURNAL)
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"line {number} is no record of a journal") from error
        if not isinstance(record, dict) or "op_code" not in record:
            raise Unreadable(f"line {number} is no record of a journal")
        records.append(record)

    class Journal(BaseJournalBackend):
        def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
            yield from records[log_number_from:]

        def append_logs(self, logs: Iterable[dict[str, Any]]) -> None:
            raise Unreadable("the dashboard does not write to studies")

    return Journal()
