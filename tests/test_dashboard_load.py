"""The dashboard under load: many followers, long runs and huge files. Minutes; the numbers are printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dashboard_server import append, step_line, write_run

pytestmark = pytest.mark.slow
FOLLOWERS, PER_SECOND, SECONDS = 20, 10, 60


@contextlib.contextmanager
def dashboard(folder: Path) -> Iterator[tuple[str, int]]:
    """(address, pid) of the server as a user starts it."""
    words = [sys.executable, "-m", "xsake", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{address}health").status_code == 200:
                        break
                time.sleep(0.05)
            yield address, process.pid
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


async def follow(client: httpx.AsyncClient, last: int, *, together: bool) -> list[int]:
    """The steps that one browser sees until step `last`."""
    seen: list[int] = []
    path = "api/events?follow=run@" if together else "api/runs/run/events"
    async with client.stream("GET", path) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            found = json.loads(line[6:])
            if together:
                found = [one["data"] for one in found if one["event"] == "step"] if isinstance(found, list) else []
            else:
                found = [found] if "loss" in found and "seconds" in found else []
            seen += [one["step"] for one in found]
            if seen and seen[-1] >= last:
                return seen
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("together", [False, True], ids=["a run's events", "the stream of the page"])
def test_twenty_followers(tmp_path, together, record_property):
    file = write_run(tmp_path / "run", 1)
    last = 1 + PER_SECOND * SECONDS

    def train() -> None:
        began = time.monotonic()
        for step in range(2, last + 1):
            time.sleep(max(0.0, began + (step - 1) / PER_SECOND - time.monotonic()))
            append(file, step_line(step, loss=random.random()))

    async def everybody(address: str) -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
            return await asyncio.gather(*(follow(client, last, together=together) for _ in range(FOLLOWERS)))

    with dashboard(tmp_path) as (address, pid):
        trainer = threading.Thread(target=train)
        before, began = cpu_seconds(pid), time.monotonic()
        trainer.start()
        seen = asyncio.run(everybody(address))
        share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
        trainer.join()
        memory = peak_megabytes(pid)
    print(f"{FOLLOWERS} followers, {PER_SECOND} steps/s, {SECONDS} s: {memory:.0f} MB, {share:.1%} of a core")
    assert all(steps == list(range(1, last + 1)) for steps in seen), "an event was lost or came twice"
    assert memory < 150 and share < 0.2


def long_run(folder: Path, steps: int) -> Path:
    file = write_run(folder, 0, config={"length": 64, "batch": 4, "steps": steps})
    draw = random.Random(0)
    with open(file, "a") as opened:
        for step in range(1, steps + 1):
            opened.write(step_line(step, loss=draw.random(), gradient_norm=draw.random(), mfu=draw.random()))
    return file


def test_a_run_of_200_000_steps_opens_in_a_second(tmp_path):
    file = long_run(tmp_path / "run", 200_000)
    with dashboard(tmp_path) as (address, pid), httpx.Client(base_url=address, timeout=60) as client:

        def open_page() -> tuple[float, dict]:
            began = time.monotonic()
            assert client.get("api/runs").status_code == client.get("api/runs/run").status_code == 200
            series = client.get("api/runs/run/series").json()
            return time.monotonic() - began, series

        began = time.monotonic()
        cold, first = open_page()  # the server has just started, and shows what it has read
        while client.get("api/runs/run").json()["read_share"] is not None:
            time.sleep(0.05)
        whole = time.monotonic() - began
        warm, series = open_page()
        began = time.monotonic()
        zoomed = client.get("api/runs/run/series?from=100000&to=101000&metrics=loss").json()
        zoom = time.monotonic() - began
        memory = peak_megabytes(pid)
    loss = series["series"]["loss"]
    print(
        f"{file.stat().st_size:,} bytes: opens in {cold:.2f} s right after the start (step {first['to']:,}; all after "
        f"{whole:.1f} s), in {warm:.2f} s later; zooms in {zoom:.2f} s; {memory:.0f} MB"
    )
    assert len(loss["step"]) <= 2000 and loss["step"][-1] > 199_000 and series["to"] == 200_000
    assert zoomed["series"]["loss"]["step"] == list(range(100_000, 101_001))
    assert warm < 1 and memory < 150


@pytest.mark.timeout(900)
def test_a_gigabyte_of_steps_is_read_in_bounded_memory(tmp_path):
    file = write_run(tmp_path / "run", 0)
    step = 0
    with open(file, "a") as opened:
        while opened.tell() < 1 << 30:
            opened.write("".join(step_line(step + n) for n in range(1, 10_001)))
            step += 10_000
    with dashboard(tmp_path) as (address, pid), httpx.Client(base_url=address, timeout=60) as client:
        began, slowest = time.monotonic(), 0.0
        while client.get("api/runs/run").json()["read_share"] is not None:
            asked = time.monotonic()
            assert client.get("health").json()["status"] == "ok"  # it answers all the while
            slowest = max(slowest, time.monotonic() - asked)
            time.sleep(0.2)
        took, memory = time.monotonic() - began, peak_megabytes(pid)
        assert client.get("api/runs/run").json()["step"] == step
    print(f"{step:,} steps read in {took:.0f} s, {memory:.0f} MB; /health answered within {slowest:.2f} s")
    assert memory < 200
