"""How a command ends that a person asked for wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What a person can mend is told in a sentence, with no traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed; models need it: pip install 'xsake[model]'", err=True)
        raise typer.Exit(1) from error
    except (ValueError, NotImplementedError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
