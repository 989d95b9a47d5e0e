"""`xsake dashboard`: see runs, studies, masks and benchmarks in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import check_folder_out

Storages = Annotated[list[str] | None, typer.Option(help="An Optuna storage: a journal file or a URL.")]
Records = Annotated[Path | None, typer.Option(help="Folder of records; by default the checkout's.")]


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders of them; by default here.")] = None,
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8321,
    host: Annotated[
        str, typer.Option(help="Address to serve on. All but localhost lets others read it.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name by which browsers may reach the server.")
    ] = None,
    storage: Storages = None,
    records: Records = None,
    model: Annotated[str, typer.Option(help="For your own texts: a published model or a model file.")] = "smollm2",
    profile: Annotated[
        Path | None, typer.Option(help="The model's HADS profile, if it is not a published one.")
    ] = None,
) -> None:
    """Serve pages that show training runs live, tuning, HADS's masks, benchmarks and replays; read only.

    Prints its address and opens nothing by itself. Ctrl-C ends it.
    """
    with plain_errors(extra="dashboard"):
        from xsake.dashboard.serve.command import default_records, gather, serve

        documents = gather(runs or [Path()], storages=storage or [], records=records or default_records())
        options: dict[str, Any] = dict(host=host, port=port, allow_hosts=allow_host or [], model=model, profile=profile)
        serve(documents, **options, say=typer.echo)


def showcase(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs to show too, besides the recorded ones.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write; a showcase that is there is replaced.")] = Path(
        "site"
    ),
    storage: Storages = None,
    records: Records = None,
) -> None:
    """Write the dashboard's pages as static files with the recorded data inside.

    Open index.html in a browser, or put the folder on any static host.
    """
    with plain_errors(extra="dashboard"):
        from xsake.dashboard.serve.command import default_records, gather
        from xsake.dashboard.show.showcase import MOST_BYTES, build

        check_folder_out(out)
        records = records or default_records()
        if records is None and not runs:
            raise ValueError(
                "no records here: run this in a checkout of xsake, or give --records FOLDER or folders of runs"
            )
        shown = gather(runs or [], storages=storage or [], records=records, own_tuning=False)
        sizes = build(shown, out)
        for part, size in sizes.items():
            typer.echo(f"{part:12} {size:>12,} bytes")
        total = sum(sizes.values())
        typer.echo(f"{'all':12} {total:>12,} bytes: {out / 'index.html'}")
        if total > MOST_BYTES:
            typer.echo(f"more than {MOST_BYTES:,} bytes: slow to load for some", err=True)
