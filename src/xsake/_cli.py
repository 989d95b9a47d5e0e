"""The `xsake` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xsake.autotune.cli import autotune
from xsake.autotune.tuning_cli import app as tuning
from xsake.hads.cli import calibrate, evaluate
from xsake.model.data_cli import app as data
from xsake.model.generate_cli import generate
from xsake.model.model_cli import app as model
from xsake.model.train_cli import train

app = typer.Typer(
    help="Block-sparse attention for JAX: look at this machine, and see sparse attention run on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.command()
def info() -> None:
    """Devices, versions, which implementation serves what here, and where its tuning comes from."""
    from xsake import _info

    _info.show()


@app.command()
def demo(
    length: int = typer.Option(4096, help="Tokens.", min=256),
    heads: int = typer.Option(8, help="Heads; their densities run from 10% to 90%.", min=2),
    head_dim: int = typer.Option(64, help="Size of a head.", min=16),
    model: bool = typer.Option(True, help="Also SmolLM2 with HADS; it is fetched if it is not here (93 MB)."),
    out: Annotated[Path, typer.Option(help="Where its records and pictures go.")] = Path("out/demo"),
) -> None:
    """A mask for each head, sparse attention against dense on this machine: the same numbers, and the time of each;
    then a language model with fewer and fewer blocks, chosen by HADS and by others."""
    from xsake import _demo, _info

    _info.show()
    _demo.show(length=length, heads=heads, head_dim=head_dim)
    if model:
        from xsake.hads.study import short

        short.show(out)


app.command()(autotune)
app.add_typer(tuning, name="tuning")
app.command()(generate)
app.add_typer(model, name="model")
app.add_typer(data, name="data")
app.command()(train)
app.command()(calibrate)
app.command()(evaluate)


if __name__ == "__main__":
    app()
