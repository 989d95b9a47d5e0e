"""`xsake dashboard`: find runs, studies and records, and serve them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from xsake import tuning_db
from xsake.dashboard.read.library import Given, Library
from xsake.dashboard.serve.guard import LOOPBACK, check_name
from xsake.dashboard.show.documents import Documents
from xsake.dashboard.show.tuning_documents import Tuning, check_storage

_PACKAGE = Path(__file__).resolve().parents[2]  # of a development install: the checkout


def checkout() -> Path | None:
    """The checkout of xsake that this file is in; for an installed package, the one that the command runs in."""
    for folder in (_PACKAGE, Path.cwd(), *Path.cwd().parents):
        if (folder / "benchmarks" / "results").is_dir() and (folder / "src" / "xsake").is_dir():
            return folder
    return None


def default_records() -> Path | None:
    """The records of the checkout."""
    return None if (folder := checkout()) is None else folder / "benchmarks" / "results"


def gather(
    folders: Sequence[Path], *, storages: Sequence[str] = (), records: Path | None = None, own_tuning: bool = True
) -> Documents:
    """The documents of the pages: runs and studies in `folders`, further storages, records, and this user's tuning."""
    if records is not None and not records.is_dir():
        raise ValueError(f"{records} is no folder of records")
    given = [Given.of(path) for path in folders]
    if records is not None:
        given.append(Given.of(records, recorded=True))
    own = tuning_db.user_directory()
    journals: list[str | Path] = [own / "studies.journal"] if own_tuning else []
    asked: list[str | Path] = [text if "://" in text else Path(text) for text in storages]
    for storage in asked:
        check_storage(storage)
    databases = ({"own": own} if own_tuning else {}) | {"shipped": tuning_db.SHIPPED}
    tuning = Tuning(journals + asked, databases, search=[one.root for one in given if one.file is None])
    return Documents(library=Library(given), tuning=tuning, records=records)


def serve(
    documents: Documents,
    *,
    host: str,
    port: int,
    allow_hosts: Sequence[str] = (),
    model: str = "smollm2",
    profile: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until interrupted. Raises OSError if the port is taken, and ValueError for other wrong options."""
    from xsake.dashboard.serve.app import make_app
    from xsake.dashboard.serve.own_text import Texts
    from xsake.dashboard.serve.server import Server

    is_local = host in LOOPBACK
    for name in allow_hosts:
        check_name(name)
    names = [*allow_hosts, *([] if is_local else [host])]
    texts = Texts(documents, model=model, profile=profile)
    if reason := texts.wrong():
        raise ValueError(reason)
    app = make_app(documents, texts=texts, names=names, any_address=not is_local)
    with _listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{listener.getsockname()[1]}/")
        if not is_local:
            say(f"Everybody who can reach {host} can read this, and there is no password.")
        Server(app, access_log=False, server_header=False).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    if not host.strip():
        raise ValueError("the host is empty: give 127.0.0.1 for this machine alone, or 0.0.0.0 for every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot serve on {host}:{port}: {error.strerror}; choose another with --port") from error
    return listener
