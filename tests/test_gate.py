"""`xsake gate`: baselines in pytest-benchmark's storage, regressions beyond the noise, and machines that are busy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from xsake._cli import app
from xsake._race import gate, verdict
from xsake._race.paired import Paired

SHAPE = "1x256x2x16,causal,density=0.5"


@pytest.fixture
def measured(monkeypatch):
    """Let measurements give these seconds; the gated call's are 0.1 s of dense attention's 1 s, times `slower`."""
    monkeypatch.setattr(verdict, "PATIENCE", 0.0)

    def measure(slower=1.0, spread=0.01, disturbed=None):
        rounds = [1 - spread, 1 - spread, 1.0, 1 + spread, 1 + spread]
        seconds = {"xsake": [0.1 * slower * x for x in rounds], "dense": [1.0] * len(rounds)}
        monkeypatch.setattr(gate.Gate, "measure", lambda self, *how: Paired(seconds, disturbed))

    return measure


def xsake(folder, *words):
    return CliRunner().invoke(app, ["gate", "--storage", str(folder), *words], env={"COLUMNS": "200"})


def test_a_baseline_and_later_measurements(measured, tmp_path):
    measured()
    said = xsake(tmp_path, "--record", "--shape", SHAPE, "--gradients")
    assert said.exit_code == 0 and "0001_xsake-gate.json" in said.output, said.output
    for then, exit_code, says in (
        (dict(), 0, "ok"),
        (dict(slower=1.04), 0, "1.04x"),
        (dict(slower=1.5), 1, "1.50x of the recorded time, and the noise lets 1.08x through"),
        (dict(slower=1.5, spread=0.5), 0, "ok"),
        (dict(slower=1.5, disturbed="threads waited for a core"), 3, "the machine is busy: no verdict"),
        (dict(slower=0.5), 0, "0.50x"),
    ):
        measured(**then)
        said = xsake(tmp_path)
        assert said.exit_code == exit_code and says in said.output, (then, said.output)


def test_pytest_benchmark_reads_the_baseline(measured, tmp_path):
    for slower in (1.0, 1.5):
        measured(slower=slower)
        assert xsake(tmp_path, "--record", "--shape", SHAPE).exit_code == 0
    command = [
        sys.executable,
        "-m",
        "pytest_benchmark",
        "--storage",
        f"file://{tmp_path}",
        "compare",
        "--columns=median",
    ]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count(f"xsake forward {SHAPE}") == 2 and "(1.50)" in told.stdout, told.stdout


def test_a_busy_machine_records_nothing(measured, tmp_path):
    measured(disturbed="threads waited for a core")
    said = xsake(tmp_path, "--record", "--shape", SHAPE)
    assert said.exit_code == 3 and "nothing recorded" in said.output and not list(tmp_path.iterdir())


def test_wrong_words_and_baselines(measured, tmp_path):
    measured()
    for words, says in (
        ([], "has no baseline: make one with --record and --shape"),
        (["--record"], "--record needs --shape"),
        (["--record", "--shape", "4096"], "the query's shape '4096' is not right"),
        (["--record", "--shape", SHAPE, "--implementation", "flash"], "implementation='flash' is unknown"),
        (["--record", "--shape", SHAPE, "--implementation", "dense"], "implementation='dense' is unknown"),
        (["--record", "--shape", SHAPE, "--implementation", "fa4"], "implementation='fa4' is unknown"),
    ):
        said = xsake(tmp_path, *words)
        assert said.exit_code == 1 and says in said.output, said.output
    xsake(tmp_path, "--record", "--shape", SHAPE)
    (path,) = tmp_path.rglob("*.json")
    kept = json.loads(path.read_text())
    kept["machine_info"]["device"] = "TPU v9"
    path.write_text(json.dumps(kept))
    assert "is a baseline of TPU v9, and this is" in xsake(tmp_path).output
