"""Files are replaced whole; a writer removes the leftovers of killed writers, and never the files of live ones."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xsake._ground import atomic
from xsake.model.training.watch.run_file import RunFile

SOURCE = Path(__file__).resolve().parents[1] / "src"


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a [x].json"


def writer(path: Path) -> subprocess.Popen:
    """A process that is in the middle of writing the file."""
    code = f"""
import sys, time
from xsake._ground import atomic
with atomic.replacing({str(path)!r}) as file:
    file.write(b"half")
    file.flush()
    print("on", flush=True)
    sys.stdin.readline()
"""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SOURCE)}, **pipes)
    assert process.stdout.readline() == b"on\n"
    return process


def test_a_file_is_replaced_whole(path):
    atomic.write_text(path, "old")
    with atomic.replacing(path) as file:
        file.write(b"n\xc3\xa9w")
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == "néw" and names(path) == [path.name]


def test_a_full_disk_is_told_with_the_file_that_did_not_fit(path):
    """Played by a limit on the size of files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run_file = path.with_name("metrics.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as of_replacing:
            atomic.write_text(path, "x" * 200_000)
        with pytest.raises(OSError, match="File too large") as of_pieces, atomic.replacing(path) as pieces:
            for _ in range(100):
                pieces.write(b"x" * 3000)  # closing tries to write the last of them again
        with pytest.raises(OSError, match="File too large") as of_run, RunFile(run_file, step=0) as file:
            file.write("start", 0, command="x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert of_replacing.value.filename == of_pieces.value.filename == str(path)
    assert of_run.value.filename == str(run_file)
    assert names(path) == [run_file.name]


def test_a_writer_that_fails_leaves_the_old_file(path):
    atomic.write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic.replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(path) == [path.name]


def test_whoever_may_read_other_new_files_may_read_this_one(path):
    before = os.umask(0o027)
    try:
        atomic.write_text(path, "x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_check_writable_changes_nothing(path):
    atomic.check_writable(path)
    assert names(path) == []
    with pytest.raises(OSError):
        atomic.check_writable(path / "below" / "file")


def test_leftovers_of_a_killed_writer_are_removed_and_those_of_a_live_one_stay(path):
    dead, live = writer(path), writer(path)
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    others = [path.with_name("b.json.00000000.part"), path.with_name(f"{path.name}.part"), path.with_name("mine.part")]
    for other in others:
        other.write_text("not of this file")
    assert len(names(path)) == 5
    atomic.write_text(path, "next")
    assert len(names(path)) == 5, "the file, one live writer, and what is not of this file"
    live.communicate(b"\n")
    assert live.returncode == 0 and path.read_text() == "half"
    assert names(path) == sorted([path.name, *(other.name for other in others)])


def test_many_writers_at_once(path):
    """Each writer removes leftovers while the others create, lock and rename their own files."""
    texts = [str(n) * 1000 for n in range(8)]
    failed = []

    def write(text: str) -> None:
        try:
            for _ in range(25):
                atomic.write_text(path, text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and path.read_text() in texts and names(path) == [path.name]
