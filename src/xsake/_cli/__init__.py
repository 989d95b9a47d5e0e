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


_INFO = dict(budget=0.2, decode_budget=0.1, tokens=None, batch=1, model=None, profile=None)


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
def _info(
    hads: Annotated[bool, typer.Option("--hads", help="Show instead what HADS runs for some sizes, and why.")] = False,
    budget: Annotated[float, typer.Option(help="With --hads: the share of a prompt's blocks.")] = 0.2,
    decode_budget: Annotated[float, typer.Option(help="With --hads: the share of a new token's blocks.")] = 0.1,
    tokens: Annotated[int | None, typer.Option(help="With --hads: this length alone.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="With --hads: so many sequences at once.", min=1)] = 1,
    model: Annotated[
        str | None, typer.Option(help="With --hads: look for the profile of this model, by its weights.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="With --hads: this profile.", exists=True)] = None,
) -> None:
    """Show devices, versions, the implementation that serves a call here, and where its tuning comes from."""
    from xsake._cli import info

    given = dict(budget=budget, decode_budget=decode_budget, tokens=tokens, batch=batch, model=model, profile=profile)
    with plain_errors():
        if hads:
            if model is not None and profile is not None:
                raise ValueError("--model looks for a profile: leave out --profile, or --model")
            from xsake._cli import info_hads

            info_hads.show(**given)  # type: ignore[arg-type]
        elif told := [f"--{name.replace('_', '-')}" for name, value in given.items() if value != _INFO[name]]:
            raise ValueError(f"{' and '.join(told)} {'are' if len(told) > 1 else 'is'} for --hads")
        else:
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
