"""How a command ends on an error that the user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from xsake._ground.extras import Extra, missing

# In errors of JAX: too little memory, or no device of the requested kind.
_ENVIRONMENT = ("RESOURCE_EXHAUSTED", "Unable to initialize backend")


@contextlib.contextmanager
def plain_errors(extra: Extra = "model") -> Iterator[None]:
    """Print an error that the user can mend as one sentence, without a traceback, and exit with code 1.

    `extra` is what installs the packages that the command needs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        typer.echo(missing(error.name, extra), err=True)
        raise typer.Exit(1) from error
    except BrokenPipeError:  # whoever reads the output has enough of it, as in `| head`: typer ends quietly
        raise
    except (ValueError, NotImplementedError, OSError, FloatingPointError) as error:
        typer.echo(_sentence(error), err=True)
        raise typer.Exit(1) from error
    except RuntimeError as error:
        if not any(reason in str(error) for reason in _ENVIRONMENT):
            raise
        typer.echo(str(error).splitlines()[0], err=True)
        raise typer.Exit(1) from error


def _sentence(error: Exception) -> str:
    """The error's text; an error of the system without its number: "/data/run: Permission denied"."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
