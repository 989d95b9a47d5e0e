"""Hostile files and requests: refused or shown plainly, nothing executed, the server alive."""

from __future__ import annotations

import errno
import json
import logging
import lzma
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from dashboard_server import append, documents, following, library_of, serving, step_line, write_run

from xsake.dashboard.read import stored
from xsake.dashboard.read.inside import Outside, open_inside, read_inside
from xsake.dashboard.read.library import Library
from xsake.dashboard.read.line_reader import LONGEST_LINE
from xsake.dashboard.read.run import Run
from xsake.dashboard.serve import server
from xsake.dashboard.show import run_documents

NASTY = '<img src=x onerror=alert(1)>"&\n../..'


def test_files_outside_the_given_folder_are_not_read(tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text(step_line(1, loss=42.515625))
    write_run(tmp_path / "elsewhere", 3)
    given = tmp_path / "runs"
    (given / "link").mkdir(parents=True)
    (given / "link" / "metrics.jsonl").symlink_to(secret)
    (given / "folder").symlink_to(tmp_path / "elsewhere")
    (given / "inner").mkdir()
    write_run(given / "real", 1)
    (given / "inner" / "metrics.jsonl").symlink_to(given / "real" / "metrics.jsonl")  # leads nowhere else
    (given / "pipe").mkdir()
    os.mkfifo(given / "pipe" / "metrics.jsonl")
    (given / "device").mkdir()
    (given / "device" / "metrics.jsonl").symlink_to("/dev/zero")
    listed = run_documents.runs(library_of(given))
    assert {run["id"] for run in listed["runs"]} == {"real", "inner"}
    reasons = {one["path"].partition("/")[2]: one["reason"] for one in listed["skipped"]}
    assert "leads out of" in reasons["link"] and "not a plain file" in reasons["pipe"]
    assert "leads out of" in reasons["device"] and "42.515625" not in json.dumps(listed)
    for path in (given / ".." / "secret.jsonl", given / "link" / "metrics.jsonl"):
        with pytest.raises(Outside):
            open_inside(given.resolve(), path)
    with pytest.raises(Outside, match="larger than 10 bytes"):
        read_inside(given.resolve(), given / "real" / "metrics.jsonl", 10)


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path):
    write_run(tmp_path / "runs" / "a", 1)
    write_run(tmp_path / "elsewhere", 7)
    library = library_of(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere")
    library.update()
    assert library.runs[0].state.step == 1 and "leads out of" in library.runs[0].problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "plain", 3)
    name = "<b>bold<script>alert(1)</script>"
    file = write_run(folder / name.replace("/", "\\"), 1, config={"steps": 9, NASTY: NASTY}, command=NASTY)
    append(
        file, step_line(2, **{NASTY: 1.0, "loss": 10**400, "text": "5", "flag": True, "gradient_norm": float("inf")})
    )
    append(file, json.dumps({"event": NASTY, "step": 2, "x": NASTY}) + "\n")
    append(file, json.dumps({"event": "density", "step": 2, "layers": "none"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with serving(documents(folder)) as client:
        yield client


def test_names_and_texts_are_data(client):
    (run,) = [run for run in client.get("/api/runs").json()["runs"] if "script" in run["name"]]
    assert run["id"].replace("~", "").replace("_", "").isalnum() and run["steps"] == 9
    answer = client.get(f"/api/runs/{run['id']}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["command"] == NASTY and answer.json()["config"][NASTY] == NASTY
    names = {metric["name"] for metric in answer.json()["metrics"]}
    assert NASTY in names and "text" not in names and "flag" not in names
    with following(client, f"/api/runs/{run['id']}/events") as stream:
        (other,) = stream.take(1, "other")  # a name with a line feed would have broken the stream
        assert other["data"]["x"] == NASTY
    metrics = client.get("/metrics").text
    assert "<script>" not in metrics.replace('name="<b>bold<script>', "") and "onerror" not in metrics


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "10.0.0.1"])
def test_other_hosts_are_refused(client, host):
    answer = client.get("/api/runs", headers={"Host": host})
    assert answer.status_code in (400, 403)  # 400 from the server itself: no Host at all
    assert "plain" not in answer.text


def test_right_hosts_are_served(client):
    for host in ("localhost", "localhost:1234", "127.0.0.1:80", "[::1]:80", "LOCALHOST"):
        assert client.get("/health", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example", "file://"])
def test_other_origins_are_refused(client, origin):
    for path in ("/api/runs", "/api/runs/plain/events", "/metrics", "/"):
        assert client.get(path, headers={"Origin": origin}).status_code == 403
    answer = client.post("/api/texts", json={"text": "x"}, headers={"Origin": origin})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "forbidden"
    assert client.get("/health", headers={"Origin": str(client.base_url).rstrip("/")}).status_code == 200


def test_pages_of_other_sites_may_link_but_not_embed(client):
    linked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/docs", headers=linked).status_code == 200
    assert client.get("/api/runs", headers=linked | {"Sec-Fetch-Mode": "no-cors"}).status_code == 403
    for path in ("/docs", "/api/runs", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


def test_paths_lead_nowhere(client):
    for path in (
        "/api/runs/..%2f..%2fetc%2fpasswd",
        "/api/runs/%2e%2e/series",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/assets/..%2f..%2f..%2fpyproject.toml",
        "/docs/..%2fcore.py",
        "/api/recordings/..%2f..%2fx",
        "/api/replays/x/frames/..%2fx",
        "/api/runs/" + "a" * 5000,
        "/api/runs/%00",
        "/api/benchmarks/%00..",
        "//etc/passwd",
    ):
        answer = client.get(path)
        assert answer.status_code in (400, 403, 404), (path, answer.status_code)
        assert "root:" not in answer.text and "setuptools" not in answer.text


def test_wrong_requests_get_a_sentence(client):
    for path, message in (
        ("/api/runs/plain/series?points=5", "points=5 must be from 100 to 20000"),
        ("/api/runs/plain/series?metrics=none", "the run has loss"),
        ("/api/runs/plain/series?from=9&to=1", "must not be above"),
        ("/api/runs/plain/series?from=x", "query.from"),
        ("/api/runs/plain/events?after=zzz", "is no event id"),
        ("/api/tuning/studies/none", "there is no study"),
        ("/api/texts/none", "there is no text"),
    ):
        error = client.get(path).json()["error"]
        assert message in error["message"] and error["code"] in ("bad_request", "not_found")
    assert client.request("TRACE", "/").status_code == 400
    assert (
        client.post("/api/texts", content=b"text=x").status_code == 400
    )  # no JSON: a form of another page may send it


def test_texts_are_checked_before_anything_starts(client):
    big = client.post("/api/texts", json={"text": "x" * 10_000_000})
    assert big.status_code == 413 and big.json()["error"]["code"] == "too_large"

    def pieces():
        yield b'{"text": "'
        for _ in range(20):
            yield b"x" * 100_000
        yield b'"}'

    chunked = client.post("/api/texts", content=pieces(), headers={"Content-Type": "application/json"})
    assert chunked.status_code == 413
    for body in (
        {"text": ""},
        {"text": 5},
        [],
        {"text": "x", "length": 10**9},
        {"text": "x", "budgets": [7]},
        {"x": 1},
    ):
        answer = client.post("/api/texts", json=body)
        assert answer.status_code in (400, 503), answer.text  # 503 without the model
    nested = client.post("/api/texts", content=b"[" * 100_000, headers={"Content-Type": "application/json"})
    assert nested.status_code == 400
    assert client.get("/health").json()["status"] == "ok"


def test_head_is_answered_as_get_without_the_body(client):
    for path in ("/", "/api/runs", "/api/runs/plain", "/health", "/metrics", "/assets/icon.svg"):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head("/api/runs").headers["content-length"] == str(len(client.get("/api/runs").content))
    assert client.head("/api/runs/plain/events").headers["content-type"].startswith("text/event-stream")  # and it ends
    assert client.head("/api/runs/none").status_code == 404


def raw(client, data: bytes) -> socket.socket:
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=10)
    connection.sendall(data)
    return connection


POST = b"POST /api/texts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"


def test_half_a_request_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_TIMEOUT", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(documents(folder)) as client, following(client, "/api/runs/plain/events") as stream:
        stream.take(3)
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: local", POST, whole + b"GET / HTTP/1.1\r\n"):
            with raw(client, sent) as connection:
                while connection.recv(1 << 16):  # until it is closed, or the socket's own limit
                    pass
        assert client.get("/health").json()["followers"] == 1  # a whole request is answered as long as it takes


def test_a_client_that_hangs_up_prints_nothing(client, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    for _ in range(3):
        raw(client, POST).close()
    assert client.get("/health").status_code == 200
    time.sleep(0.1)
    assert not caplog.records


def test_a_run_that_cannot_be_shown_is_one_runs_problem(tmp_path, monkeypatch):
    """Whatever is wrong in the code that reads a run: the others are read and followed."""
    bad, plain = write_run(tmp_path / "bad", 1), write_run(tmp_path / "plain", 3)
    reads = Run._take

    def take(run, lines):
        if run.id == "bad":
            raise ZeroDivisionError("by nothing")
        reads(run, lines)

    with serving(documents(tmp_path)) as client, following(client, "/api/runs/plain/events") as stream:
        stream.take(3)
        monkeypatch.setattr(Run, "_take", take)
        append(bad, step_line(2))
        deadline = time.monotonic() + 10
        while not (skipped := client.get("/api/runs").json()["skipped"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert skipped[0]["path"].endswith("bad") and "ZeroDivisionError: by nothing" in skipped[0]["reason"]
        append(plain, step_line(4))
        assert stream.take(1)[0]["data"]["step"] == 4 and client.get("/metrics").status_code == 200
        monkeypatch.setattr(Run, "_take", reads)
        append(bad, step_line(3))
        while client.get("/api/runs").json()["skipped"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_health_tells_of_a_reader_that_fails_and_the_reader_goes_on(folder, monkeypatch):
    search = Library.search

    def failing(library):
        raise RuntimeError("no luck")

    with serving(documents(folder)) as client:

        def wait_for(status):
            deadline = time.monotonic() + 10
            while (answer := client.get("/health")).json()["status"] != status:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return answer

        monkeypatch.setattr(Library, "search", failing)
        answer = wait_for("failing")
        assert answer.status_code == 503 and "RuntimeError: no luck" in answer.json()["problem"]
        monkeypatch.setattr(Library, "search", search)
        assert wait_for("ok").status_code == 200


def test_a_run_is_not_gone_when_file_descriptors_are_short(tmp_path, monkeypatch):
    def short(*words, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = write_run(tmp_path / "a", 2)
    with serving(documents(tmp_path)) as client, following(client, "/api/runs/a/events") as stream:
        first = stream.take(2)[0]["id"]
        with monkeypatch.context() as patch:
            patch.setattr("os.scandir", short)
            patch.setattr("xsake.dashboard.read.run.open_inside", short)
            append(file, step_line(3))
            with following(client, f"/api/runs/a/events?after={first}") as later:
                time.sleep(1.5)  # longer than from one search to the next
                assert client.get("/api/runs/a").json()["step"] == 2
                assert client.get("/api/runs").json()["skipped"][0]["reason"] == "Too many open files"
                patch.undo()
                assert [stream.next()["event"], later.next()["event"]] == ["step", "status"]
                assert [event["data"]["step"] for event in later.take(2)] == [2, 3]


def test_a_folder_deleted_while_shown(folder, client):
    file = write_run(folder / "short", 2)
    deadline = time.monotonic() + 10
    while client.get("/api/runs/short").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with following(client, "/api/runs/short/events") as stream:
        stream.take(2)
        shutil.rmtree(file.parent)
        assert stream.take(1, "gone")
    answer = client.get("/api/runs/short")
    assert answer.status_code == 410 and "was deleted" in answer.json()["error"]["message"]
    assert "short" not in client.get("/api/runs").text


def test_a_line_without_end_takes_bounded_memory(tmp_path):
    """A line longer than is read at all is passed over, and what follows is read."""
    file = write_run(tmp_path / "a", 2)
    append(file, '{"event": "step", "step": 3, "x": "')
    with open(file, "r+b") as opened:  # sparse: zeros up to there take no disk
        opened.truncate(file.stat().st_size + 3 * LONGEST_LINE)
    append(file, '"}\n' + step_line(4))
    library = library_of(tmp_path)
    for _ in range(8):
        library.update()
    assert library.runs[0].state.step == 4


def test_a_file_of_a_gigabyte_is_read_in_pieces(tmp_path):
    """A sparse gigabyte in the middle: seconds and megabytes, in a process of its own to measure the memory."""
    file = write_run(tmp_path / "a", 2)
    with open(file, "r+b") as opened:
        opened.truncate(1 << 30)
    append(file, "\n" + step_line(3))
    code = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        from pathlib import Path
        from xsake.dashboard.read.library import Given, Library
        library = Library([Given.of(Path({str(tmp_path)!r}))])
        library.search()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while library.update(): pass
        print(library.runs[0].state.step, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    step, megabytes = map(int, done.stdout.split())
    assert step == 3 and megabytes < 64


def test_damaged_records_and_bombs_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MOST_UNPACKED", 1 << 20)
    records = tmp_path / "results"
    (records / "explorer").mkdir(parents=True)
    (records / "a.json").write_text("{" * 1000)
    (records / "b.json").write_text("[]")
    (records / "c.json").write_text(
        '{"environment": {"date": NaN, "commit": 1e999}, "results": [{"seconds": -Infinity}]}'
    )
    (records / "explorer" / "nan.json.xz").write_bytes(lzma.compress(b'{"about": {"id": "nan", "length": NaN}}'))
    (records / "explorer" / "bomb.json.xz").write_bytes(lzma.compress(b"0" * (stored.MOST_UNPACKED + 10), preset=1))
    (records / "explorer" / "cut.json.xz").write_bytes(lzma.compress(b'{"about": {}}')[:-9])
    (records / "explorer" / "link.json.xz").symlink_to("/etc/passwd")
    stored.write(tmp_path / "elsewhere" / "x.json.xz", {"about": {"id": "x"}})
    (records / "replays").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    shown = documents(tmp_path / "runs", records)
    with serving(shown) as client:
        states = {one["id"]: one["state"] for one in client.get("/api/benchmarks").json()["benchmarks"]}
        assert states == {"a": "unreadable", "b": "unreadable", "c": "recorded"}
        assert client.get("/api/benchmarks/c").json()["environment"] == {"date": None, "commit": None}
        (recording,) = client.get("/api/recordings").json()["recordings"]
        assert (recording["id"], recording["length"]) == ("nan", None)
        assert client.get("/api/replays").json() == {"replays": []}
        for name in ("bomb", "cut", "link"):
            answer = client.get(f"/api/recordings/{name}")
            assert answer.status_code == 404 and "cannot be read" in answer.json()["error"]["message"]
