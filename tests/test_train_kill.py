"""kill -9 for real, at several moments: the losses are those of a run that nobody killed, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from train_process import start
from training import losses, make_config, make_data

from xsake.model.training.loop import train
from xsake.model.training.watch.run_file import read_events

pytestmark = pytest.mark.xdist_group("training")
STEPS = {"steps": 40, "warmup": 2}


def kill_when(process: subprocess.Popen, ready, wait: float = 0.0) -> None:
    """Kill a process `wait` seconds after `ready()`, with a signal that cannot be caught."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()


@pytest.mark.slow  # test_train_run.py stops a run in this process, in the middle of a line
def test_killed_and_carried_on_bit_for_bit(tmp_path):
    data, run = make_data(tmp_path / "data"), tmp_path / "run"
    file, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    whole = losses(train(make_config(**STEPS), data=data, run=tmp_path / "whole", quiet=True))

    def steps() -> int:
        return max((event["step"] for event in read_events(file)), default=0)

    def saved() -> set[str]:
        return {path.name for path in checkpoints.glob("*")}

    # While a checkpoint is being written: its folder has appeared, and is not whole yet.
    kill_when(start(data=data, run=run, changes=STEPS, devices=8), saved)
    assert 0 < steps() < 40
    assert losses(train(make_config(**STEPS), data=data, run=run, checkpoint_every=3, quiet=True)) == whole
    resumed = [event["step"] for event in read_events(file) if event["event"] == "resumed"]
    assert all(step % 3 == 0 for step in resumed) and len(resumed) <= 1


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")
def test_killed_and_carried_on_with_another_mesh(tmp_path):
    """From data x model x sequence = 2x2x2 to 4x2x1: the losses of one device, to rounding."""
    data, run = make_data(tmp_path / "data"), tmp_path / "run"
    file, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    whole = losses(train(make_config(**STEPS), data=data, run=tmp_path / "whole", quiet=True))
    process = start(data=data, run=run, changes=STEPS, devices=8, mesh=(2, 2, 2))
    kill_when(process, lambda: any(path.name.isdecimal() for path in checkpoints.glob("*")))
    assert 0 < max(event["step"] for event in read_events(file)) < 40
    moved = losses(train(make_config(**STEPS), data=data, run=run, mesh=(4, 2, 1), quiet=True))
    assert [event["step"] % 3 for event in read_events(file) if event["event"] == "resumed"] == [0]
    np.testing.assert_allclose(moved, whole, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [0, 7, 20, 45, 80, 150])
def test_killed_at_any_moment(tmp_path, milliseconds):
    data, run = make_data(tmp_path / "data"), tmp_path / "run"
    whole = losses(train(make_config(**STEPS), data=data, run=tmp_path / "whole", quiet=True))
    for _ in range(3):
        lines = len(read_events(run / "metrics.jsonl"))
        process = start(data=data, run=run, changes=STEPS, devices=8)
        kill_when(process, lambda lines=lines: len(read_events(run / "metrics.jsonl")) > lines, milliseconds / 1000)
    assert losses(train(make_config(**STEPS), data=data, run=run, checkpoint_every=3, quiet=True)) == whole
