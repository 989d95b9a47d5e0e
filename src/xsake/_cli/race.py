"""`xsake race`: which implementation of attention is fastest, for given shapes, on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from xsake._cli.errors import plain_errors
from xsake._cli.options import SHAPE, check_file_out, duration

if TYPE_CHECKING:
    from xsake._race.one import Finished, Setting


def race(
    shape: Annotated[
        str,
        typer.Option(help=f"{SHAPE}, such as 1x32768x32x128,kv=8,causal,density=0.1."),
    ],
    density: Annotated[
        float | None, typer.Option(help="Share of the blocks that attend, where the shape says none; by default all.")
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="Contestants beside xsake, separated by commas: implementations or their files, "
            "dense, cudnn, tokamax, flex, fa4."
        ),
    ] = "dense",
    gradients: Annotated[bool, typer.Option(help="Race forward and backward together, too.")] = False,
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.", min=2)] = 5,
    out: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw the times into this file (.png, .svg).")] = None,
    limit: Annotated[str, typer.Option(help="Time after which compiling a contestant counts as hanging.")] = "120s",
) -> None:
    """Race implementations in random order with equal pauses, each checked beside the oracle."""
    console = Console()
    with plain_errors("tune"):
        from xsake._measure.isolation import Failed, Worker, reason
        from xsake._op import registry
        from xsake._race import contestants, one
        from xsake._race.course import BOTH, FORWARD

        for path in filter(None, (out, chart)):
            check_file_out(path)
        if chart is not None:
            import matplotlib  # noqa: F401 before the race, which may take minutes
        names = list(dict.fromkeys([contestants.OURS, *map(registry.name_of, filter(None, against.split(",")))]))
        contestants.check_names(names)
        if density is not None and "density=" in shape:
            raise ValueError(f"--density {density:g} and {shape!r} both give a density: leave out one of them")
        asked = 1.0 if density is None else density
        one.parsed(shape, asked, "float32")  # says what is wrong with it
        worker = Worker(one.service(shape, asked))
        try:
            with console.status("compiling and racing"):
                setting = worker.call("setting", limit=duration(limit))
                directions = [FORWARD, BOTH] if gradients else [FORWARD]
                found = [one.run(worker, names, d, rounds=rounds, limit=duration(limit)) for d in directions]
        except Failed as failed:
            raise ValueError(reason(failed)) from failed
        finally:
            worker.close()
        for finished in found:
            _show(console, shape, finished, setting)
        product = f"{setting.peak_tflops:.3g} TFLOP/s, a product of large matrices in {setting.dtype}"
        console.print(f"{setting}; the peak is {product}", soft_wrap=True, highlight=False)
        if out is not None:
            _write(out, shape, found, setting)
        if chart is not None:
            _draw(chart, shape, found)


def _show(console: Console, shape: str, finished: Finished, setting: Setting) -> None:
    ours = next((r["sustained"]["median"] for r in finished.rows if r["contestant"] == "xsake"), None)
    title = f"{shape}, {finished.density:.0%} of the blocks, {finished.direction} in {setting.dtype}"
    whole = [Column(name, no_wrap=True) for name in ("contestant", "ms per call", "quartiles", "TFLOP/s")]
    table = Table(*whole, "of peak", "xsake is", "error (allowed)", title=title, title_justify="left", padding=(0, 0))
    for row in sorted(finished.rows, key=lambda row: row["sustained"]["median"]):
        time = row["sustained"]
        table.add_row(
            row["contestant"],
            f"{time['median'] * 1e3:.3f}",
            f"{time['low'] * 1e3:.2f}-{time['high'] * 1e3:.2f}",
            f"{row['tflops']:.3g}",
            f"{row['tflops'] / setting.peak_tflops:.0%}",
            f"{time['median'] / ours:.2f}x" if ours and row["contestant"] != "xsake" else "",
            _error(row["errors"]),
        )
    console.print(table)
    for name, reason in finished.reasons.items():
        console.print(f"[bold]{name}[/bold] does not race: {escape(reason)}", soft_wrap=True)
    if finished.disturbed:
        console.print(f"[yellow]The race was disturbed[/yellow]: {escape(finished.disturbed)}", soft_wrap=True)


def _error(errors: dict[str, dict[str, float]]) -> str:
    """The worst of a contestant's results, beside what is allowed."""
    if not errors:
        return ""
    worst = max(errors, key=lambda name: errors[name]["max"] / errors[name]["allowed_max"])
    return f"{errors[worst]['max']:.1e} ({errors[worst]['allowed_max']:.1e})"


def _write(path: Path, shape: str, found: list[Finished], setting: Setting) -> None:
    from xsake._ground import atomic

    about: dict[str, Any] = {"shape": shape, "dtype": setting.dtype, "device": setting.facts.device_kind}
    about |= {"environment": setting.facts.environment, "peak_tflops": setting.peak_tflops}
    about |= {"races": [dataclasses.asdict(f) for f in found]}
    atomic.write_text(path, json.dumps(about, indent=1) + "\n")


def _draw(path: Path, shape: str, found: list[Finished]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1 + 0.4 * sum(len(f.rows) for f in found)), layout="constrained")
    for axis, finished in zip(figure.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        times = [row["sustained"] for row in finished.rows]
        spread = [[t["median"] - t["low"] for t in times], [t["high"] - t["median"] for t in times]]
        names = [row["contestant"] for row in finished.rows]
        axis.barh(names, [t["median"] * 1e3 for t in times], xerr=[[1e3 * x for x in side] for side in spread])
        axis.set_title(f"{shape}, {finished.density:.0%}, {finished.direction}", fontsize=8)
        axis.set_xlabel("ms per call")
        axis.invert_yaxis()
    figure.savefig(path, dpi=150)
