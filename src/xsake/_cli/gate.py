"""`xsake gate`: is a call still as fast as it was on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xsake._cli.errors import plain_errors

if TYPE_CHECKING:
    from xsake._race.gate import Gate, Outcome

_COLOURS = {"ok": "green", "slower": "red", "busy": "yellow"}


def gate(
    record: Annotated[
        bool, typer.Option("--record", help="Measure the shapes, and keep them as the baseline.")
    ] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="With --record: 1x4096x8x64,causal,density=0.4, as in `xsake race`. May be given several times."
        ),
    ] = None,
    implementation: Annotated[str, typer.Option(help="With --record: a backend; xsake takes the best.")] = "xsake",
    gradients: Annotated[bool, typer.Option(help="With --record: forward and backward together, too.")] = False,
    storage: Annotated[Path, typer.Option(help="Folder of the baselines, which pytest-benchmark reads.")] = Path(
        ".benchmarks"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement.", min=3)] = 7,
    round_seconds: Annotated[float, typer.Option(help="Seconds per turn.", min=0.0)] = 0.2,
) -> None:
    """Measure calls beside dense attention, and compare with the baseline of this machine.

    The exit code is 1 if a call is slower than noise explains, otherwise 3 if the machine was too busy for a verdict.
    """
    console = Console()
    how = {"rounds": rounds, "round_seconds": round_seconds}
    with plain_errors("tune"):
        from xsake._op import registry
        from xsake._race import gate as gates
        from xsake._race.entrants import OURS
        from xsake._race.verdict import Busy

        if record != bool(shape):
            raise ValueError("--record needs --shape, and shapes are of no use without --record")
        if record:
            registry.check_name(None if implementation == OURS else implementation)
            try:
                path = gates.record(_gates(shape or [], implementation, gradients), storage, **how)  # type: ignore[arg-type]
            except Busy as busy:
                console.print(f"nothing recorded: {escape(str(busy))}", soft_wrap=True)
                raise typer.Exit(3) from busy
            console.print(f"recorded in {path}", soft_wrap=True)
            return
        path, kept = gates.baseline(storage)
        outcomes = [gates.compare(extra, **how) for extra in kept]  # type: ignore[arg-type]
    _show(console, path, outcomes)
    verdicts = {outcome.verdict for outcome in outcomes}
    raise typer.Exit(1 if "slower" in verdicts else 3 if "busy" in verdicts else 0)


def _gates(shapes: list[str], implementation: str, gradients: bool) -> list[Gate]:
    from xsake._race.case import BOTH, FORWARD
    from xsake._race.gate import Gate
    from xsake._race.one import parsed, usual_dtype

    directions = [FORWARD, BOTH] if gradients else [FORWARD]
    for shape in shapes:
        parsed(shape, 1.0, usual_dtype())  # says what is wrong with it, before anything is measured
    return [
        Gate(shape=shape, implementation=implementation, direction=direction, dtype=usual_dtype())
        for shape in shapes
        for direction in directions
    ]


def _show(console: Console, path: Path, outcomes: list[Outcome]) -> None:
    table = Table("call", "recorded", "now", "slower by", "allowed", "", title=f"Time over dense attention's; {path}")
    for o in outcomes:
        now, allowed = o.now or 0.0, o.allowed or 0.0
        colour = _COLOURS[o.verdict]
        numbers = (f"{o.then:.3f}", f"{now:.3f}", f"{now / o.then:.2f}x", f"{allowed:.2f}x")
        table.add_row(escape(o.gate.name), *numbers, f"[{colour}]{o.verdict}[/{colour}]")
    console.print(table)
    for o in outcomes:
        if o.reason:
            console.print(f"{escape(o.gate.name)}: {escape(o.reason)}", soft_wrap=True)
