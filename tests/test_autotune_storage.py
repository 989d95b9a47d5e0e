"""Studies in other storages: SQLite, and PostgreSQL and Redis where their servers are installed. Two processes each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import tuning_fakes
from tuning_fakes import PROBLEM, part, start

from xsake.autotune.search.storage import open_storage
from xsake.autotune.search.study import Study


def check_two_processes(url: str, folder: Path) -> None:
    open_storage(url)  # makes the tables: two at once would both try
    code = f"""
import pathlib, tuning_fakes
folder = pathlib.Path({str(folder)!r})
tuning_fakes.tune(folder, service=lambda: tuning_fakes.Pair(folder), storage={url!r}, rounds=2)
"""
    processes = [start(folder / f"tune{n}.py", code) for n in range(2)]
    assert [p.wait(120) for p in processes] == [0, 0]
    for plan in tuning_fakes.Service().open(PROBLEM):
        study = Study(open_storage(url), "Fake 9000", plan, 0)
        assert not study.untried and study.best[0].part == part(2)


@pytest.mark.slow
def test_sqlite(tmp_path):
    check_two_processes(f"sqlite:///{tmp_path}/studies.db", tmp_path)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


def needs(binary: str, package: str) -> pytest.MarkDecorator:
    missing = [f"the program {binary}"] if shutil.which(binary) is None else []
    missing += [f"the package {package}"] if importlib.util.find_spec(package) is None else []
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.mark.slow
@needs("initdb", "psycopg2")
def test_postgresql(tmp_path):
    port, data = _free_port(), tmp_path / "data"
    as_user: dict = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        as_user = {"user": "nobody"}
        shutil.chown(tmp_path, "nobody")
        for parent in tmp_path.parents[:2]:
            parent.chmod(0o755)
    subprocess.run(
        ["initdb", "-D", str(data), "-U", "xsake", "-A", "trust"], check=True, capture_output=True, **as_user
    )
    command = ["postgres", "-D", str(data), "-p", str(port), "-k", str(tmp_path)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, **as_user)
    try:
        _wait_for(port)
        check_two_processes(f"postgresql+psycopg2://xsake@127.0.0.1:{port}/postgres", tmp_path)
    finally:
        server.send_signal(signal.SIGINT)  # SIGTERM would wait for our own connections
        server.wait()


@pytest.mark.slow
@needs("redis-server", "redis")
def test_redis(tmp_path):
    port = _free_port()
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", ""], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(port)
        check_two_processes(f"redis://127.0.0.1:{port}", tmp_path)
    finally:
        server.terminate()
        server.wait()
