"""Two real processes that train together over `jax.distributed` agree with each other and with a single process."""

from __future__ import annotations

import json

import numpy as np
import pytest
from train_process import free_port, start
from training import losses, make_config, make_data

from xsake.model.training.loop import train

pytestmark = pytest.mark.xdist_group("training")


@pytest.mark.parametrize(
    ("mesh", "devices", "changes"),
    [
        ((2, 1), 1, {}),  # each reads its half of every batch
        pytest.param((1, 1, 8), 4, {"length": 256}, id="sequence"),  # each has half the tokens
    ],
)
@pytest.mark.slow  # test_sharded_processes has two processes in CI
def test_two_processes_agree(tmp_path, mesh, devices, changes):
    """Checkpoints are written by both, the run file by one."""
    data, run = make_data(tmp_path / "data"), tmp_path / "together"
    address = f"localhost:{free_port()}"
    options = dict(data=data, run=run, changes=changes, mesh=mesh, devices=devices)
    processes = [start(**options, join=[address, 2, number]) for number in (0, 1)]
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (_, error) in zip(processes, ended, strict=True):
        assert process.returncode == 0, error.decode()
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    assert first == second == losses(run / "metrics.jsonl")
    alone = losses(train(make_config(**changes), data=data, run=tmp_path / "alone", quiet=True))
    np.testing.assert_allclose(first, alone, atol=1e-5, rtol=0)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["3", "6"]
