"""Runs as the dashboard reads them: bounded memory, extremes kept, events that resume by id."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dashboard_server import append, documents, following, library_of, serving, step_line, write_run

from xsake.dashboard.read import library as library_module
from xsake.dashboard.read import thinning
from xsake.dashboard.read.library import Given, Library
from xsake.dashboard.read.line_reader import Place
from xsake.dashboard.read.run import Noted, Run
from xsake.dashboard.read.thinning import Curve, Points, thin
from xsake.dashboard.serve import live as live_module
from xsake.dashboard.serve.live import Live
from xsake.dashboard.show import run_documents
from xsake.model.training.watch.run_file import RunFile


def points(values, start=0):
    steps = np.arange(start, start + len(values))
    return Points(steps, steps * 0.5, np.asarray(values, float))


@hypothesis.given(
    st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=80), st.sampled_from([1, 2, 4, 16]), st.data()
)
def test_thinning_keeps_extremes_and_may_be_done_in_parts(values, bucket, data):
    whole = thin(points(values), bucket)
    for begin in range(0, len(values), bucket):
        part = np.array(values[begin : begin + bucket])
        kept = whole.between(begin, begin + bucket - 1).value
        if np.isfinite(part).any():
            assert (np.nanmin(part), np.nanmax(part)) == (np.nanmin(kept), np.nanmax(kept))
        assert np.isnan(part).any() == np.isnan(kept).any() and len(kept) <= 3
    assert (np.diff(whole.step) > 0).all()
    twice = thin(thin(points(values), max(bucket // 2, 1)), bucket)
    np.testing.assert_array_equal(twice.value, whole.value)
    # A curve that grows in pieces is the same curve.
    curve = Curve()
    curve.bucket = bucket
    at = 0
    while at < len(values):
        size = data.draw(st.integers(1, 20))
        curve.add(points(values[at : at + size], at))
        at += size
    np.testing.assert_array_equal(curve.points.step, whole.step)


def test_a_curve_takes_bounded_memory(monkeypatch):
    monkeypatch.setattr(thinning, "MOST_BUCKETS", 64)
    curve, values = Curve(), np.random.default_rng(0).normal(size=20_000)
    values[12_345] = 1e9
    for at in range(0, len(values), 1000):
        curve.add(points(values[at : at + 1000], at))
    assert len(curve.points) <= 128 and curve.count == 20_000
    assert curve.points.value.max() == 1e9 and curve.points.step[curve.points.value.argmax()] == 12_345
    noted = Noted()
    for number in range(10_000):
        noted.add(number)
    assert len(noted.all()) < 300 and noted.all()[0] == 0 and noted.all()[-1] == 9999


def make_run(file):
    return Run(identity="a", name="a", shown_path="a", root=file.parent.resolve(), path=file.resolve())


def test_lines_are_read_as_they_are_finished(tmp_path):
    file = write_run(tmp_path, 2)
    run = make_run(file)
    assert run.update() and run.state.step == 2 and not run.update()
    line = step_line(3)
    append(file, line[:40])
    run.update()
    assert run.state.step == 2
    append(
        file,
        line[40:] + "\n\nnot json\n[1]\n{}\n" + '{"event": "step", "step": "4"}\n' + step_line(4, loss=float("nan")),
    )
    run.update()
    assert run.state.step == 4 and run.state.events == 5
    assert np.isnan(run.state.curves["loss"].points.value[-1])
    append(file, step_line(3) + step_line(5))  # a step that is there twice counts once
    run.update()
    assert run.state.curves["loss"].points.step.tolist() == [1, 2, 3, 4, 5]
    assert run.state.seconds == pytest.approx(2.5)


def test_a_long_run_is_thinned_and_zoomed_into(tmp_path, monkeypatch):
    monkeypatch.setattr(thinning, "MOST_BUCKETS", 128)
    rng = np.random.default_rng(0)
    values = rng.normal(size=3000)
    values[777] = 99.0
    lines = "".join(step_line(n + 1, loss=float(value)) for n, value in enumerate(values))
    append(write_run(tmp_path / "a", 0), lines)
    library = library_of(tmp_path)
    whole = run_documents.series(library, "a", metrics="loss", points=100)
    loss = whole["series"]["loss"]
    assert whole["bucket"] > 1 and len(loss["step"]) <= 100
    assert max(loss["value"]) == 99.0 and loss["step"][loss["value"].index(99.0)] == 778
    near = run_documents.series(library, "a", metrics="loss", points=2000, first=700, last=900)
    assert near["series"]["loss"]["step"] == list(range(700, 901)) and near["bucket"] == 1
    np.testing.assert_allclose(near["series"]["loss"]["value"], values[699:900], rtol=1e-6)
    np.testing.assert_allclose(near["series"]["loss"]["time"], np.arange(700, 901) * 0.5, rtol=1e-6)


def test_ids_name_places_and_notice_another_file(tmp_path):
    file = write_run(tmp_path, 3)
    run = make_run(file)
    run.update()
    place = run.state.place
    assert Place.parse(str(place)) == place and Place.parse("1-2") is None and Place.parse("x" * 50) is None
    assert run.is_known(place)
    append(file, step_line(4))
    assert run.is_known(place)
    written = run.written_in_file(Place())
    assert [sent.name for sent in written.events] == ["start", "step", "step", "step", "step"]
    assert run.is_known(Place.parse(written.events[2].identity))
    write_run(tmp_path, 5, other=1)
    assert not run.is_known(place)


def test_a_resumed_run_goes_on_in_the_same_curve(tmp_path):
    """`RunFile` drops the steps after the checkpoint: followers are told to load the curve anew."""
    file = write_run(tmp_path / "run", 9)
    shown = documents(tmp_path)
    with serving(shown) as client, following(client, "/api/runs/run/events") as stream:
        assert [event["data"]["step"] for event in stream.take(9)] == list(range(1, 10))
        with RunFile(file, step=6) as resumed:
            resumed.write("step", 7, loss=1.0, seconds=0.5)
        reset = stream.take(1, "reset")[0]
        assert "resumes" in reset["data"]["reason"] and "id" not in reset
        series = client.get("/api/runs/run/series").json()["series"]["loss"]
        assert series["step"] == [1, 2, 3, 4, 5, 6, 7] and series["value"][-1] == 1.0
        assert client.get("/api/runs/run").json()["resumed"][0]["step"] == 6


def test_events_arrive_live_and_resume_by_id(tmp_path):
    file = write_run(tmp_path / "run", 3)
    with serving(documents(tmp_path)) as client:
        loaded = client.get("/api/runs/run/series").json()
        assert loaded["series"]["loss"]["step"] == [1, 2, 3]
        with following(client, f"/api/runs/run/events?after={loaded['last_id']}") as stream:
            assert stream.next()["event"] == "status"
            append(file, step_line(4))
            began = time.monotonic()
            (live,) = stream.take(1)
            assert live["data"]["step"] == 4 and live["data"]["time"] == pytest.approx(2.0)
            assert time.monotonic() - began < 2
            append(file, json.dumps({"event": "eval", "step": 4, "loss": 3.5}) + "\n")
            append(file, json.dumps({"event": "density", "step": 4, "layers": [[0.5, 0.3]]}) + "\n")
            (evaluated,), (density,) = stream.take(1, "eval"), stream.take(1, "density")
            assert evaluated["data"]["held_out_loss"] == 3.5 and density["data"]["density"] == 0.4
        append(file, "".join(step_line(step) for step in range(5, 8)))  # while nobody follows
        with following(client, "/api/runs/run/events", **{"Last-Event-ID": live["id"]}) as stream:
            assert [event["data"]["step"] for event in stream.take(3)] == [5, 6, 7]
        run = client.get("/api/runs/run").json()
        assert run["held_out_loss"] == 3.5 and run["densities"] == [{"step": 4, "layers": [[0.5, 0.3]]}]
        assert run["kept_share"] == pytest.approx(0.4) and run["tokens"] == 7 * 256
        with following(client, "/api/runs/run/events?after=ff-00000000-0") as stream:
            assert stream.take(1, "reset")


def test_one_stream_carries_several_runs(tmp_path):
    first, second = write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 1)
    with serving(documents(tmp_path)) as client:
        last = client.get("/api/runs/a").json()["last_id"]
        with following(client, f"/api/events?follow=a@{last},b@,nothing@") as stream:
            (listed,) = stream.take(1, "runs")
            assert {run["id"] for run in listed["data"]["runs"]} == {"a", "b"}
            append(first, step_line(3))
            append(second, step_line(2))
            seen = []
            while len(seen) < 3:
                seen += [
                    (e["run"], e["data"]["step"]) for e in stream.take(1, "run")[0]["data"] if e["event"] == "step"
                ]
            assert sorted(seen) == [("a", 3), ("b", 1), ("b", 2)]
            shutil.rmtree(tmp_path / "a")
            while not any(e["run"] == "a" and e["event"] == "gone" for e in stream.take(1, "run")[0]["data"]):
                pass
            append(second, step_line(3))
            while not any(e["data"].get("step") == 3 for e in stream.take(1, "run")[0]["data"]):
                pass


def test_streams_end_with_the_server(tmp_path):
    write_run(tmp_path / "a", 2)

    async def follow() -> list[list[bytes]]:
        live = Live(documents(tmp_path).library)
        live.library.search()
        live.library.update()
        streams = [live.follow_run("a", None), live.follow_list("a@")]
        firsts = [await anext(stream) for stream in streams]
        assert live.followers == 2 and all(b"event: " in first for first in firsts)
        live.close()
        rest = [[part async for part in stream] for stream in streams]
        assert live.followers == 0
        return rest

    for rest in asyncio.run(asyncio.wait_for(follow(), 10)):
        assert len(rest) <= 2


def test_a_run_that_just_began_is_served(tmp_path, monkeypatch):
    """By a search for the run that is asked for: the searches by the clock are minutes apart here."""
    monkeypatch.setattr(live_module, "SEARCH_EVERY", 300.0)

    def step_of(client, name):
        deadline = time.monotonic() + 20  # a busy machine searches for a tenth of the time
        while (found := client.get(f"/api/runs/{name}")).status_code == 404 and time.monotonic() < deadline:
            time.sleep(0.02)
        return found.json()["step"]

    with serving(documents(tmp_path)) as client:
        assert client.get("/api/runs").json()["runs"] == []
        write_run(tmp_path / "new", 3)
        assert step_of(client, "new") == 3
        write_run(tmp_path / "newer", 2)
        assert step_of(client, "newer") == 2
        with following(client, "/api/runs/newer/events") as stream:
            assert [event["data"]["step"] for event in stream.take(2)] == [1, 2]


def test_wrong_ids_search_for_a_tenth_of_the_time(tmp_path, monkeypatch):
    searches = []

    def slow(given):
        searches.append(time.monotonic())
        time.sleep(0.02)
        return iter(())

    monkeypatch.setattr(library_module, "find_runs", slow)
    library = Library([Given.of(tmp_path)])
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert library.find("wrong") is None
    assert searches and all(later - earlier > 0.2 for earlier, later in itertools.pairwise(searches))


def test_status(tmp_path):
    file = write_run(tmp_path / "run", 5, process={"host": socket.gethostname(), "pid": os.getpid()})
    run = make_run(file)
    run.update()

    def status():
        return run_documents.status_of(run)[0]

    assert status() == "running"
    old = time.time() - 60
    run.state.at, run.modified = old, old
    assert run_documents.status_of(run)[0] == "stalled" and "no event since" in run_documents.status_of(run)[1]
    run.state.at = run.modified = time.time() - 5
    assert status() == "running"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run.state.process = {"host": socket.gethostname(), "pid": ended.pid}
    assert status() == "stalled"  # without waiting: its process is not there
    run.state.process = {"host": "another host", "pid": ended.pid}
    assert status() == "running"
    run.state.process = {"host": socket.gethostname(), "pid": os.getpid()}
    append(file, json.dumps({"event": "resumed", "step": 5, "process": run.state.process}) + "\n")
    run.update()
    run.state.at = run.modified = old
    assert run_documents.status_of(run) == ("running", "its first step is compiling")
    append(file, json.dumps({"event": "failed", "step": 5, "reason": "the loss is nan"}) + "\n")
    run.update()
    assert run_documents.status_of(run) == ("failed", "the loss is nan")
    append(file, json.dumps({"event": "resumed", "step": 5}) + "\n" + step_line(100))
    run.update()
    assert status() == "finished"


def test_a_run_whose_first_step_compiles_is_not_stalled(tmp_path):
    process = {"host": socket.gethostname(), "pid": os.getpid()}
    file = write_run(tmp_path / "run", 0, process=process, time=time.time() - 60)
    os.utime(file, (time.time() - 60,) * 2)
    (run,) = library_of(tmp_path).runs
    assert run_documents.status_of(run) == ("running", "its first step is compiling")
    run.state.process = process | {"host": "another host"}
    assert run_documents.status_of(run)[0] == "stalled"  # nothing is known of its process


def test_runs_are_found_and_named(tmp_path):
    write_run(tmp_path / "a" / "run", 1)
    write_run(tmp_path / "b" / "run", 1)
    write_run(tmp_path / "a" / "b" / "c" / "d" / "e" / "too deep", 1)
    write_run(tmp_path / ".hidden", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    listed = run_documents.runs(library_of(tmp_path))
    assert {(run["id"], run["path"].partition("/")[2]) for run in listed["runs"]} == {
        ("run", "a/run"),
        ("run~2", "b/run"),
    }
    assert listed["skipped"][0]["reason"] == "the run file holds no event yet"
    with pytest.raises(ValueError, match="neither a folder nor a run file"):
        Given.of(tmp_path / "nothing")
    assert [run.id for run in library_of(tmp_path / "a" / "run" / "metrics.jsonl").runs] == ["metrics"]
