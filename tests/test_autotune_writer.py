"""The database's writer: two writers lose nothing of each other, and no failure breaks the existing file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from filelock import FileLock
from sweep import sweep
from tuning_fakes import KEY, entry, start

from xsake.autotune.search.storage import CannotOpen, open_storage
from xsake.autotune.write import lock, writer
from xsake.tuning_db import Database, Entry


def merge(path: Path, *entries: Entry) -> Database:
    return writer.merge(path, "cpu", entries, {"e": {"cores": 2}})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "cpu.json"


def leftovers(path: Path) -> list[str]:
    return [p.name for p in path.parent.glob("*.part")]


def test_merge_adds_and_replaces(path):
    merge(path, entry(1), entry(2, q_len=256))
    merge(path, entry(3, date="2026-01-02"))
    database = Database.read(path)
    assert len(database) == 2 and database.exact(KEY).config["chunk"] == 3
    assert database.environments == {"e": {"cores": 2}} and not leftovers(path)


def test_of_two_entries_the_measured_and_the_later_one_stays(path):
    merge(path, entry(1, date="2026-05-01"))
    merge(path, entry(2, date="2026-01-01"))
    assert Database.read(path).exact(KEY).config["chunk"] == 1
    merge(path, entry(3, date="2027-01-01", source="schedule"))
    assert Database.read(path).exact(KEY).config["chunk"] == 1


def test_files_of_another_device_are_not_mixed(path):
    merge(path, entry(1))
    with pytest.raises(writer.CannotWrite, match="is for 'cpu', and the entries are for 'NVIDIA H200'"):
        writer.merge(path, "NVIDIA H200", [entry(2)], {})
    assert len(Database.read(path)) == 1


@pytest.mark.parametrize("text", ["", "{", "null", '{"schema_version": 1}'], ids=["empty", "truncated", "null", "bare"])
def test_an_unreadable_file_is_set_aside(path, text):
    path.parent.mkdir()
    path.write_text(text)
    merge(path, entry(1))
    assert len(Database.read(path)) == 1
    (aside,) = path.parent.glob("cpu.json.unreadable-*")
    assert aside.read_text() == text


def test_a_file_of_the_future_is_left_alone(path):
    path.parent.mkdir()
    path.write_text('{"schema_version": 4}')
    for write in (lambda: merge(path, entry(1)), lambda: writer.check_writable(path)):
        with pytest.raises(writer.CannotWrite, match="left alone: its schema_version is 4"):
            write()
    assert path.read_text() == '{"schema_version": 4}'


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(writer.CannotWrite, match="cannot be written"):
        writer.check_writable(tmp_path / "file" / "cpu.json")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here refuses files from everybody")
def test_a_file_that_cannot_be_locked_is_told_at_once(monkeypatch):
    monkeypatch.setattr(lock, "FileLock", None)  # it would wait
    for write in (lambda: merge(Path("/proc/x"), entry(1)), lambda: writer.check_writable(Path("/proc/x"))):
        with pytest.raises(writer.CannotWrite, match=r"/proc/x cannot be written: .*No such file or directory"):
            write()
    with pytest.raises(CannotOpen, match=r"storage '/proc/x' cannot be opened: .*No such file or directory"):
        open_storage("/proc/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(path):
    merge(path, entry(1))
    path.parent.chmod(0o555)
    try:
        for write in (lambda: merge(path, entry(2)), lambda: writer.check_writable(path)):
            with pytest.raises(writer.CannotWrite):
                write()
    finally:
        path.parent.chmod(0o755)
    assert Database.read(path).exact(KEY).config["chunk"] == 1


def test_a_read_only_file_system(path, monkeypatch):
    """Simulated in the writer, since permissions do not stop root."""
    merge(path, entry(1))

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(writer.atomic, "_new_part", refuse)
    for write in (lambda: merge(path, entry(2)), lambda: writer.check_writable(path)):
        with pytest.raises(writer.CannotWrite, match="Read-only file system"):
            write()
    assert Database.read(path).exact(KEY).config["chunk"] == 1


# -- in processes of their own ---------------------------------------------------------------------------------------


def run(path: Path, code: str, **options) -> subprocess.Popen:
    head = f"""
import pathlib, resource
from test_autotune_writer import merge
from tuning_fakes import entry
path = pathlib.Path({str(path)!r})
"""
    script = path.parent.parent / f"run{time.monotonic_ns()}.py"
    return start(script, head + code.strip(), **options)


@pytest.mark.parametrize("rounds", sweep([25, 100], slow=[100]))
def test_two_writers_lose_nothing(path, rounds):
    numbers = "heads=2 ** {who}, q_len=2 ** (n % 50), kv_len=2 ** (n // 50)"
    code = f"for n in range({rounds}): merge(path, entry(n + 1, {numbers}))"
    writers = [run(path, code.format(who=1 + who)) for who in range(2)]
    assert [w.wait(120) for w in writers] == [0, 0]
    assert len(Database.read(path)) == 2 * rounds


def test_kill_9_while_writing_leaves_a_whole_file(path):
    """Killed again and again, at any moment."""
    merge(path, *[entry(n, q_len=2**n) for n in range(1, 40)])
    size = len(Database.read(path))
    for attempt in range(2):
        process = run(
            path, "print('on', flush=True)\nwhile True: merge(path, entry(7, heads=64))", stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == "on\n"
        time.sleep(0.05 + 0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert len(Database.read(path)) in (size, size + 1)
    assert len(merge(path, entry(8, heads=64, date="2026-02-02"))) == size + 1, "and the lock is free"
    assert not leftovers(path), "of the writers that were killed"


def test_the_next_writer_removes_what_a_killed_one_left(path):
    merge(path, entry(1))
    mine, others = path.with_name("cpu.json.0123abcd.part"), path.with_name("tpu.json.0123abcd.part")
    for write in (
        lambda: merge(path, entry(2)),
        lambda: writer.check_writable(path),
        lambda: writer.prune(path, lambda entry: True),
    ):
        for left in (mine, others):
            left.write_text("half a fi")
        write()
        assert leftovers(path) == [others.name]


def test_nobody_writes_without_the_lock(path, monkeypatch):
    merge(path, entry(1))
    monkeypatch.setattr(writer, "_PATIENCE", 0.01)
    with FileLock(f"{path}.lock"):
        for write in (lambda: merge(path, entry(2)), lambda: writer.prune(path, lambda entry: False)):
            with pytest.raises(writer.CannotWrite, match=r"is locked by another writer for more than 0.01 s"):
                write()
    assert len(writer.prune(path, lambda entry: False)) == len(Database.read(path)) == 0


def test_a_full_disk_leaves_the_old_file(path):
    """A limit on the size of files refuses the write half way, as a full disk does."""
    merge(path, entry(1))
    before = path.read_bytes()
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
merge(path, *[entry(n, q_len=2 ** n) for n in range(1, 40)])
"""
    process = run(path, code, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "CannotWrite" in said and "could not be written and is as it was: [Errno 27] File too large" in said
    assert path.read_bytes() == before and not leftovers(path)


def test_written_files_are_json(path):
    merge(path, entry(1))
    given = json.loads(path.read_text())
    assert given["schema_version"] == 1 and given["entries"][0]["config"] == {"q": 32, "kv": 32, "chunk": 1}
