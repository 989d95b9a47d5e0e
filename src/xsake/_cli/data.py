"""`xsake data`: make training data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import check_folder_out

app = typer.Typer(help="Make training data from text.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make training data from text."""


@app.command()
def build(
    files: Annotated[list[Path], typer.Argument(help="Text files, or folders of them; each file is one text.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary to train, in tokens.")] = 16384,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use instead of training one.")] = None,
    holdout: Annotated[
        float, typer.Option(help="Share of the texts that is kept for evaluation; at least one.")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per file.", min=1)] = 1 << 25,
) -> None:
    """Train a byte-level BPE tokenizer on text, and write the text as memory-mapped token files."""
    with plain_errors():
        from xsake.model.data import build as data_build
        from xsake.model.data.progress import part_of

        check_folder_out(out)
        try:
            built = data_build.build(
                files, out, vocab_size=vocab, tokenizer=tokenizer, holdout=holdout, shard_tokens=shard_tokens
            )
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command goes on with what is finished, in {part_of(out)}", err=True)
            os._exit(130)  # at once: threads of the tokenizers library cannot be stopped
        per_token = built.bytes_read / max(1, sum(built.tokens.values()))
        typer.echo(f"{out}: vocabulary of {built.vocab_size}, {per_token:.2f} bytes per token")
        for split, tokens in built.tokens.items():
            typer.echo(f"{split:6} {tokens:>13,} tokens from {built.texts[split]:,} texts")
        if holdout and not built.texts["held"]:
            typer.echo("nothing is held out: that takes two texts that differ. Train without --eval-every")
        if built.not_utf8:
            typer.echo(f"{built.not_utf8} files were not UTF-8; their invalid bytes became replacement characters")
