"""The `xsake` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import xsake
from xsake._cli import (
    autotune,
    check,
    dashboard,
    data,
    gate,
    generate,
    hads,
    model,
    new_kernel,
    plan,
    race,
    train,
    tuning,
)
from xsake._cli.errors import plain_errors
from xsake._cli.options import check_folder_out

app = typer.Typer(
    help="Block-sparse attention for JAX: look at this machine, and see sparse attention run on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xsake {xsake.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
) -> None:
    pass


@app.command("info")
def _info() -> None:
    """Show devices, versions, the implementation that serves a call here, and where its tuning comes from."""
    from xsake._cli import info

    info.show()


@app.command("demo")
def _demo(
    length: int = typer.Option(4096, help="Tokens per sequence.", min=256),
    heads: int = typer.Option(8, help="Heads; their densities run from 10% to 90%.", min=2),
    head_dim: int = typer.Option(64, help="Size of a head.", min=16),
    model: bool = typer.Option(True, help="Also run SmolLM2 with HADS; the model is fetched if missing (93 MB)."),
    out: Annotated[Path, typer.Option(help="Folder for the records and pictures of SmolLM2.")] = Path("out/demo"),
) -> None:
    """Compare sparse attention, with a mask per head, to dense attention on this machine: the same numbers, and the
    time of each. Then compare a language model to itself with fewer blocks, chosen by HADS and by other methods."""
    with plain_errors():
        from xsake._cli import info
        from xsake._cli.demo import command as demo_command
        from xsake._cli.demo import model as demo_model

        demo_command.check_memory(length=length, heads=heads, head_dim=head_dim)
        if model:
            check_folder_out(out)
        info.show()
        demo_command.show(length=length, heads=heads, head_dim=head_dim)
        if model:
            demo_model.show(out)


app.command()(autotune.autotune)
app.command()(check.check)
app.command()(new_kernel.new_kernel)
app.command()(race.race)
app.command()(gate.gate)
app.add_typer(tuning.app, name="tuning")
app.command()(generate.generate)
app.add_typer(model.app, name="model")
app.add_typer(data.app, name="data")
app.command()(train.train)
app.command()(hads.calibrate)
app.command()(hads.evaluate)
app.command()(plan.plan)
app.command()(dashboard.dashboard)
app.command()(dashboard.showcase)
