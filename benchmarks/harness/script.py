"""Options, records that grow, and tables of the scripts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import record

Row = dict[str, Any]


def parser(doc: str | None, *, rounds: int | None = None, dense: bool = False) -> argparse.ArgumentParser:
    """With --record and --out, which both set `out`: the folder of the record, or None; with --rounds and --dense where
    a script has them."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = made.add_mutually_exclusive_group()
    words = "write to benchmarks/results"
    out.add_argument("--record", dest="out", action="store_const", const=record.RESULTS, help=words)
    out.add_argument("--out", type=Path, metavar="DIR", help="write to another folder")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="turns of each contestant")
    if dense:
        made.add_argument("--dense", default="cudnn", choices=["cudnn", "xla"], help="who computes dense attention")
    return made


def listed(kind: Callable[[str], Any] = str, among: Collection[str] | None = None) -> Callable[[str], list[Any]]:
    """The type of an option with commas between its values."""

    def values(text: str) -> list[Any]:
        words = [word for word in text.split(",") if word]
        if among is not None and (unknown := sorted(set(words) - set(among))):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(among)}")
        return [kind(word) for word in words]

    return values


def need_gpu(script: str) -> None:
    if jax.default_backend() != "gpu":
        raise SystemExit(f"{script} needs an NVIDIA GPU, and JAX sees none")


class Record(list[Row]):
    """The rows of a record, which is written whenever some are added: a run that is cut off keeps what it measured."""

    def __init__(self, name: str, out: Path | None, **about: Any):
        super().__init__()
        self._name, self._out, self._about = name, out, about

    def add(self, *rows: Row) -> None:
        self += rows
        self.save()

    def save(self) -> None:
        if self._out is not None:
            record.save(self._name, list(self), self._out, **self._about)


def show(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    from rich.console import Console  # interpreters of other projects' compilers may lack it
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def spread(seconds: Mapping[str, float], scale: float = 1e3, digits: int = 2) -> tuple[str, str]:
    """(median, quartiles) of a recorded timing, in milliseconds unless `scale` says otherwise."""
    median, low, high = (f"{seconds[name] * scale:.{digits}f}" for name in ("median", "low", "high"))
    return median, f"{low}-{high}"
