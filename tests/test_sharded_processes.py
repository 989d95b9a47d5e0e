"""`xsake.sharded_attention` over two real processes of four devices each: the numbers of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_process import environment, free_port

PROGRAM = Path(__file__).with_name("sharded_process.py")


@pytest.mark.parametrize("exchange", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
def test_two_processes_of_four_devices(exchange):
    join = [f"localhost:{free_port()}", "2"]
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, exchange, *join, number],
            env=os.environ | environment(devices=4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    printed = []
    for process in processes:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        printed.append(out)
    assert float(printed[0].splitlines()[-1]) < 1e-5
