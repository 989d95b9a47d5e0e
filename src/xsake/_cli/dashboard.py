"""`xsake dashboard`: see runs, studies, masks and benchmarks in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders of them; by default here.")] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8321,
    host: Annotated[
        str, typer.Option(help="Address to serve on. All but localhost lets others read it.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name by which browsers may reach the server.")
    ] = None,
    storage: Annotated[list[str] | None, typer.Option(help="An Optuna storage: a journal file or a URL.")] = None,
    records: Annotated[Path | None, typer.Option(help="Folder of records; by default the checkout's.")] = None,
    model: Annotated[str, typer.Option(help="For your own texts: a published model or a model file.")] = "smollm2",
    profile: Annotated[
        Path | None, typer.Option(help="The model's HADS profile, if it is not a published one.")
    ] = None,
) -> None:
    """Serve pages that show training runs live, tuning, HADS's masks, benchmarks and replays; read only.

    Prints its address and opens nothing by itself. Ctrl-C ends it.
    """
    with plain_errors(extra="dashboard"):
        from xsake.dashboard.serve import default_records, gather, serve

        documents = gather(runs or [Path()], storages=storage or [], records=records or default_records())
        serve(
            documents,
            host=host,
            port=port,
            allow_hosts=allow_host or [],
            model=model,
            profile=profile,
            say=typer.echo,
        )
