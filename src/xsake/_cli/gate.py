"""`xsake gate`: is a call still as fast as it was on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xsake._cli.errors import plain_errors
from xsake._cli.options import duration

if TYPE_CHECKING:
    from xsake._race.gate import Compared, Gate, Measurer

_COLOURS = {"ok": "green", "slower": "red", "failed": "red", "no verdict": "yellow"}


def gate(
    record: Annotated[
        bool,
        typer.Option("--record", help="Measure the shapes, and keep them as their baseline; other calls keep theirs."),
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="With --record: 1x4096x8x64,causal,density=0.4, as in `xsake race`. May be given several times."
        ),
    ] = None,
    implementation: Annotated[
        str, typer.Option(help="With --record: a backend, or its file; xsake: what a call without a name runs.")
    ] = "xsake",
    gradients: Annotated[bool, typer.Option(help="With --record: forward and backward together, too.")] = False,
    storage: Annotated[Path, typer.Option(help="Folder of the baselines, which pytest-benchmark reads.")] = Path(
        ".benchmarks"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement: more make it surer.", min=8)] = 15,
    round_seconds: Annotated[float, typer.Option(help="Seconds per turn.", min=0.0)] = 0.2,
    limit: Annotated[str, typer.Option(help="Time after which compiling a call counts as hanging.")] = "120s",
) -> None:
    """Measure calls beside dense attention, and compare with the baseline of this machine.

    The exit code is 1 if a call is slower beyond the noise or fails, otherwise 3 if there is no verdict on one: the
    machine was busy, or the rounds are too far apart.
    """
    console = Console()
    with plain_errors("tune"):
        from xsake._measure.isolation import Failed, Worker, reason
        from xsake._op import registry
        from xsake._race.contestants import OURS
        from xsake._race.gate import GateService, Measurer

        if record != bool(shape):
            raise ValueError("--record needs --shape, and shapes are of no use without --record")
        name = registry.name_of(implementation)
        registry.check_name(None if name == OURS else name)
        _check_shapes(shape or [])
        worker = Worker(GateService)
        try:
            measure = Measurer(worker, rounds, round_seconds, duration(limit))
            if record:
                dtype = worker.call("usual_dtype", limit=measure.limit)
                file = implementation if name != implementation else None
                exit_code = _record(console, _gates(shape or [], name, file, gradients, dtype), storage, measure)
            else:
                exit_code = _compare(console, storage, measure)
        except Failed as failed:
            raise ValueError(reason(failed)) from failed
        finally:
            worker.close()
    raise typer.Exit(exit_code)


def _check_shapes(shapes: list[str]) -> None:
    """Say what is wrong with them, before anything is measured."""
    from xsake._race.one import parsed

    for shape in shapes:
        parsed(shape, 1.0, "float32")


def _gates(shapes: list[str], name: str, file: str | None, gradients: bool, dtype: str) -> list[Gate]:
    from xsake._race.course import BOTH, FORWARD
    from xsake._race.gate import Gate
    from xsake._race.one import parsed

    directions = [FORWARD, BOTH] if gradients else [FORWARD]
    return [
        Gate(
            shape=shape,
            implementation=name,
            direction=direction,
            dtype=parsed(shape, 1.0, dtype).dtype,
            file=file,
        )
        for shape in shapes
        for direction in directions
    ]


def _record(console: Console, gates: list[Gate], storage: Path, measure: Measurer) -> int:
    from xsake._race import gate
    from xsake._race.slowdown import Busy

    try:
        path, reasons = gate.record(gates, storage, measure)
    except Busy as busy:
        console.print(f"nothing recorded: {escape(str(busy))}", soft_wrap=True)
        return 3
    console.print("nothing recorded" if path is None else f"recorded in {path}", soft_wrap=True)
    for name, why in reasons.items():
        console.print(f"{escape(name)} is not recorded: {escape(why)}", soft_wrap=True)
    return 1 if reasons else 0


def _compare(console: Console, storage: Path, measure: Measurer) -> int:
    from xsake._race import gate

    found = [gate.compare(recorded, measure) for recorded in gate.baseline(storage, measure.facts().device_kind)]
    _show(console, storage, found)
    told = {_told(compared) for compared in found}
    return 1 if told & {"slower", "failed"} else 3 if "no verdict" in told else 0


def _told(compared: Compared) -> str:
    return "failed" if compared.slowdown is None else compared.slowdown.told


def _show(console: Console, storage: Path, found: list[Compared]) -> None:
    columns = ("call", "recorded", "in", "now over recorded", "")
    table = Table(*columns, title=f"Time over dense attention's; {storage}", title_justify="left")
    for one in found:
        ratio = one.slowdown.ratio if one.slowdown is not None else None
        now = "" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
        then = "" if one.recorded.ratio is None else f"{one.recorded.ratio.median:.3f}"
        told = f"[{_COLOURS[_told(one)]}]{_told(one)}[/{_COLOURS[_told(one)]}]"
        table.add_row(escape(one.recorded.gate.name), then, one.recorded.path.name[:4], now, told)
    console.print(table)
    for one in found:
        if one.reason:
            console.print(f"{escape(one.recorded.gate.name)}: {escape(one.reason)}", soft_wrap=True)
