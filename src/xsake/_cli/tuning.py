"""`xsake tuning`: show, compare, merge, prune and check tuning databases."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from xsake import tuning_db
from xsake._cli.errors import plain_errors
from xsake.tuning_db import Database, Entry, UnreadableDatabase

app = typer.Typer(help="Show, compare, merge, prune and check tuning databases.", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(help="A database file.")]
_Files = Annotated[
    list[Path] | None, typer.Argument(help="Database files; by default the user's and the shipped ones.")
]


def _read(path: Path) -> Database:
    try:
        return Database.read(path)
    except (OSError, UnreadableDatabase) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _given(files: list[Path] | None) -> list[Path]:
    if files:
        return files
    folders = (tuning_db.user_directory(), tuning_db.SHIPPED)
    return [path for folder in folders for path in sorted(folder.glob("*.json")) if path.name != "schema.json"]


@app.command()
@plain_errors("tune")
def show(files: _Files = None) -> None:
    """Show what is in a database: one entry per row."""
    console = Console()
    for path in _given(files):
        database = _read(path)
        table = Table(
            "direction",
            "call",
            "density",
            "configuration",
            "speed-up",
            "source",
            title=f"{database.device_kind}: {path}",
        )
        for entry in database.entries:
            key = entry.key
            call = (
                f"{key.implementation} {key.dtype} {key.q_len}x{key.kv_len} {key.heads} heads/{key.group} "
                f"D{key.head_dim}/{key.value_dim} blocks {key.block_q}x{key.block_kv}{' causal' if key.causal else ''}"
            )
            speedup = entry.about.get("speedup")
            table.add_row(
                key.direction,
                call,
                "any" if key.density is None else f"{key.density:.1%}",
                _short(entry),
                "" if speedup is None else f"{speedup:.2f}x",
                entry.about["source"],
            )
        console.print(table)


def _short(entry: Entry) -> str:
    return ", ".join(f"{name}={value}" for name, value in entry.config.items())


@app.command()
@plain_errors("tune")
def diff(old: _File, new: _File) -> None:
    """Show entries that only one of two databases has, and entries whose configuration differs."""
    first, second = _read(old), _read(new)
    console = Console(soft_wrap=True, highlight=False)
    ours, theirs = ({e.key: e for e in database.entries} for database in (first, second))
    for key in sorted({*ours, *theirs}, key=str):
        if key not in theirs:
            console.print(f"- {key}: {_short(ours[key])}", markup=False)
        elif key not in ours:
            console.print(f"+ {key}: {_short(theirs[key])}", markup=False)
        elif ours[key].config != theirs[key].config:
            console.print(f"~ {key}: {_short(ours[key])} -> {_short(theirs[key])}", markup=False)


@app.command()
@plain_errors("tune")
def merge(into: _File, sources: Annotated[list[Path], typer.Argument(help="Databases to take entries from.")]) -> None:
    """Merge databases into one file. If a key has two entries, a measured entry stays before an estimated one, and the
    later entry otherwise."""
    from xsake.autotune.write import writer

    for path in sources:
        database = _read(path)
        result = writer.merge(into, database.device_kind, database.entries, database.environments)
        typer.echo(f"{into}: {len(result)} entries after {path}")


@app.command()
@plain_errors("tune")
def prune(
    file: _File, dry_run: Annotated[bool, typer.Option(help="Count the entries to drop, and change nothing.")] = False
) -> None:
    """Drop entries whose kernels changed since they were tuned."""
    from xsake._op import registry, tuned
    from xsake.autotune.write import writer
    from xsake.hads.attention.code import code_hash

    database = _read(file)

    def fresh(entry: Entry) -> bool:
        name = entry.key.implementation
        if entry.about["source"] == "record":
            return True  # a record names the revision that it measured
        if entry.key.operation == tuning_db.HADS:
            return registry.loads(name) and entry.about.get("kernel") == code_hash(name)
        return registry.loads(name) and entry.about.get("kernel") == tuned.kernel_hash(name)

    kept = sum(map(fresh, database.entries))
    if not dry_run:
        kept = len(writer.prune(file, fresh))
    typer.echo(f"{file}: {len(database) - kept} stale entries {'found' if dry_run else 'dropped'}, {kept} kept")


@app.command()
@plain_errors("tune")
def validate(
    files: _Files = None,
    race: Annotated[
        bool, typer.Option("--race", help="Race every entry against the heuristic on this device.")
    ] = False,
    drop: Annotated[bool, typer.Option("--drop", help="With --race: drop the entries that are not confirmed.")] = False,
) -> None:
    """Check databases against the format; exit code 1 if one is not valid.

    With --race it is also 1 if an entry is not confirmed, or else 3 if the machine was too busy for a verdict."""
    if drop and not race:
        raise ValueError("--drop drops what --race does not confirm: give both")
    paths, failed = _given(files), False
    for path in paths:
        problems = problems_of(path)
        failed |= bool(problems)
        typer.echo(f"{path}: {'; '.join(problems) if problems else 'valid'}")
    raise typer.Exit(code=_race(paths, drop) if race and not failed else int(failed))


def _race(paths: list[Path], drop: bool) -> int:
    """The exit code of `validate --race`."""
    from xsake._measure.isolation import Failed, Worker, reason
    from xsake.autotune.measure.device_service import DeviceService
    from xsake.autotune.search import confirm
    from xsake.autotune.write import writer

    found: set[str] = set()
    worker = Worker(DeviceService)
    try:
        for path in paths:
            states = collections.Counter[str]()
            refuted: list[Entry] = []
            for finding in confirm.confirm(_read(path), worker):
                typer.echo(f"{finding.entry.key}: {finding.state}: {finding.why}")
                states[finding.state] += 1
                if finding.state == confirm.REFUTED:
                    refuted.append(finding.entry)
            typer.echo(f"{path}: {', '.join(f'{n} {state}' for state, n in states.items()) or 'no entries'}")
            found |= set(states)
            if drop and refuted:
                kept = len(writer.prune(path, lambda entry, refuted=refuted: entry not in refuted))  # type: ignore[misc]
                typer.echo(f"{path}: {len(refuted)} entries dropped, {kept} kept")
    except Failed as failed:
        raise ValueError(reason(failed)) from failed
    finally:
        worker.close()
    return 1 if confirm.REFUTED in found else 3 if confirm.BUSY in found else 0


def problems_of(path: Path) -> list[str]:
    """Errors in a file's format (by JSON Schema if jsonschema is installed), in its order or in its name."""
    try:
        database = Database.read(path)
    except (OSError, UnreadableDatabase) as error:
        return [str(error)]
    text = path.read_text()
    problems = []
    try:
        import jsonschema
    except ModuleNotFoundError:
        pass
    else:
        schema = json.loads((tuning_db.SHIPPED / "schema.json").read_text())
        validator = jsonschema.Draft202012Validator(schema)
        problems += [
            f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(json.loads(text))
        ]
    problems += filter(None, map(_config_problem, database.entries))
    if database.dump() != text:
        problems.append("entries are not sorted one per line, or there are two for one key")
    if path.name != tuning_db.file_name(database.device_kind):
        problems.append(
            f"it is for {database.device_kind!r} and must be named {tuning_db.file_name(database.device_kind)}"
        )
    return problems


def _config_problem(entry: Entry) -> str | None:
    """Why the backend would refuse the entry's configuration, or None."""
    from xsake._op import registry, tuned

    try:
        registry.check_name(entry.key.implementation)
        if entry.key.operation == tuning_db.HADS:
            return None
        backend = registry.get(entry.key.implementation)
        if entry.key.direction not in tuned.directions(backend):
            return f"{entry.key}: {entry.key.implementation!r} has the directions {tuned.directions(backend)}"
        tuned.make_part(backend, entry.key.direction, entry.config)
    except (ValueError, NotImplementedError) as error:
        return f"{entry.key}: {error}"
    return None
