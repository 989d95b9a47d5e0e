"""`xsake gate`: baselines in pytest-benchmark's storage, regressions beyond the noise, and machines that are busy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_plugins import WHOLE
from typer.testing import CliRunner

from xsake._cli import app
from xsake._cli.gate import _gates
from xsake._measure import isolation
from xsake._measure.isolation import Died, Hung, InProcess
from xsake._op import registry
from xsake._race import slowdown
from xsake._race.gate import GateService
from xsake._race.paired import Paired

SHAPE = "1x256x2x16,causal,density=0.5"


@pytest.fixture
def measured(monkeypatch):
    """Let measurements give these seconds; the gated call's are 0.1 s of dense attention's 1 s, times `slower`."""
    monkeypatch.setattr(slowdown, "PATIENCE", 0.0)
    monkeypatch.setattr(isolation, "Worker", isolation.InProcess)
    monkeypatch.setattr(GateService, "prepare", lambda self, gate: 0.0)

    def measure(slower=1.0, spread=0.01, disturbed=None):
        call = [0.1 * slower * (1 + spread * x) for x in (-1, -0.5, 0, 0.5, 1) * 3]
        monkeypatch.setattr(GateService, "race", lambda self, *how: Paired(call, [1.0] * len(call), disturbed))

    return measure


def xsake(folder, *words):
    return CliRunner().invoke(app, ["gate", "--storage", str(folder), *words], env={"COLUMNS": "200"})


def test_a_baseline_and_later_measurements(measured, tmp_path):
    measured()
    said = xsake(tmp_path, "--record", "--shape", SHAPE, "--gradients")
    assert said.exit_code == 0 and "0001_xsake-gate.json" in said.output, said.output
    for then, exit_code, says in (
        (dict(), 0, "ok"),
        (dict(slower=1.04), 0, "1.04x (1.02-1.06)"),
        (dict(slower=1.5), 1, "1.50x of the recorded time, surely between 1.48x and 1.52x"),
        (dict(slower=0.5), 0, "0.50x"),
        (dict(slower=1.08), 1, "slower"),
        (dict(spread=0.2), 3, "the rounds are too far apart: surely between 0.89x and 1.11x of the recorded time"),
        (dict(slower=1.2, spread=0.5), 3, "no verdict"),
        (dict(disturbed="threads waited for a core"), 3, "the machine is busy (threads waited for a core)"),
        (dict(slower=1.5, disturbed="threads waited for a core"), 3, "the machine is busy"),
    ):
        measured(**then)
        said = xsake(tmp_path)
        assert said.exit_code == exit_code and says in said.output, (then, said.output)


def test_a_second_recording_keeps_the_calls_of_the_first(measured, tmp_path):
    """And replaces those that both have."""
    other = SHAPE.replace("256", "512")
    for slower, shapes in ((1.0, [SHAPE, other]), (2.0, [SHAPE])):
        measured(slower=slower)
        assert xsake(tmp_path, "--record", *(w for s in shapes for w in ("--shape", s))).exit_code == 0
    measured(slower=2.0)
    said = xsake(tmp_path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.output.splitlines() if "│" in line]
    told = [(row[2], row[3].partition(" ")[0], row[4]) for row in rows]
    assert told == [("0002", "1.00x", "ok"), ("0001", "2.00x", "slower")]
    assert said.exit_code == 1


def test_a_gate_is_named_by_the_precision_that_its_shape_gives():
    told = [gate.name for gate in _gates([SHAPE, f"{SHAPE},dtype=float16"], "xla", None, False, "float32")]
    assert told == [f"xla forward {SHAPE} float32", f"xla forward {SHAPE},dtype=float16 float16"]


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


def test_a_call_that_hangs_or_ends_the_process_leaves_the_others(measured, tmp_path, monkeypatch):
    measured()
    shapes = [word for n in (1, 2, 3) for word in ("--shape", f"{n}x256x2x16,causal,density=0.5")]

    class Broken(InProcess):
        def call(self, method, *arguments, limit):
            if method == "prepare" and arguments[0].shape[0] in failures:
                raise failures[arguments[0].shape[0]]
            return super().call(method, *arguments, limit=limit)

    monkeypatch.setattr(isolation, "Worker", Broken)
    died, hung = Died("the process ended during prepare with exit code -11"), Hung("prepare did not end within 120 s")
    failures = {"2": died}
    said = xsake(tmp_path, "--record", *shapes)
    assert said.exit_code == 1 and "0001_xsake-gate.json" in said.output, said.output
    assert "2x256x2x16,causal,density=0.5 float32 is not recorded: the process ended" in said.output
    failures = {"3": hung}
    said = xsake(tmp_path)
    assert said.exit_code == 1 and "3x256x2x16,causal,density=0.5 float32: prepare did not end" in said.output
    rows = [line for line in said.output.splitlines() if line.startswith("│")]
    assert ["failed" in row for row in rows] == [False, True] and "ok" in rows[0], said.output


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(disturbed="threads waited for a core"), "nothing recorded: the machine is busy (threads waited for"),
        (dict(spread=0.2), "are too far apart, from 0.090 to 0.110"),
    ],
)
def test_a_busy_machine_records_nothing(measured, tmp_path, how, says):
    measured(**how)
    said = xsake(tmp_path, "--record", "--shape", SHAPE)
    assert said.exit_code == 3 and says in said.output and not list(tmp_path.iterdir()), said.output


def test_a_baseline_without_rounds_is_named(measured, tmp_path):
    """As earlier versions recorded it: a ratio and a noise. Recording the call again is enough."""
    measured()
    xsake(tmp_path, "--record", "--shape", SHAPE)
    (path,) = tmp_path.rglob("*.json")
    kept = json.loads(path.read_text())
    for one in kept["benchmarks"]:
        one["extra_info"] |= {"ratio": 0.1, "noise": 0.02}
        del one["extra_info"]["ratios"]
    path.write_text(json.dumps(kept))
    said = xsake(tmp_path)
    assert said.exit_code == 1 and "0001_xsake-gate.json: of an earlier xsake, which kept no rounds" in said.output
    xsake(tmp_path, "--record", "--shape", SHAPE)
    assert xsake(tmp_path).exit_code == 0


def test_a_file_is_gated_and_found_again(measured, tmp_path, monkeypatch):
    """Which another process does not know by its name."""
    measured()
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "gated_kernel.py").write_text(WHOLE)
    file = str(tmp_path / "gated_kernel.py")
    monkeypatch.setattr(GateService, "prepare", lambda self, gate: gate.programs() and 0.0)
    assert xsake(tmp_path, "--record", "--shape", SHAPE, "--implementation", file).exit_code == 0
    registry._registered.clear()
    assert xsake(tmp_path).exit_code == 0
    assert "gated_kernel" in registry.names()
    (tmp_path / "gated_kernel.py").unlink()
    assert "there is no file" in xsake(tmp_path).output


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
    assert "has baselines of TPU v9, and this is" in xsake(tmp_path).output
    path.write_text('{"benchmarks": []}')
    assert "is no baseline of `xsake gate`" in xsake(tmp_path).output
