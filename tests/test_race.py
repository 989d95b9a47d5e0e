"""`xsake race`: contestants by name, which may be missing, fail or be wrong; tables, numbers and charts."""

from __future__ import annotations

import json
import sys

import jax
import pytest
from test_plugins import NAMES
from typer.testing import CliRunner

import xsake
from xsake._cli import app, options
from xsake._measure import isolation
from xsake._measure.isolation import Died, InProcess
from xsake._measure.nvidia_smi import Monitor
from xsake._op import registry
from xsake._race import contestants, one, sustained
from xsake._race.course import BOTH, FORWARD
from xsake.autotune import problem

SHAPE = "1x96x4x16,kv=2,causal,block=16"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PAUSE", "BURST", "SUSTAINED"):
        monkeypatch.setattr(sustained, name, 1e-4)


def finished(names, density=0.5, worker=None):
    worker = worker or InProcess(one.service(SHAPE, density))
    return one.run(worker, names, FORWARD, rounds=2, limit=60.0)


def test_contestants_that_cannot_race_are_named_with_the_reason(tmp_path):
    wrong = f"from xsake.kernels_xla_ref import forward as forward_, {NAMES}\n"
    wrong += "def forward(call, config):\n    out, lse = forward_(call, config)\n    return out * 1.01, lse\n"
    (tmp_path / "wrong_in_a_race.py").write_text(wrong)
    xsake.register_backend("wrong", tmp_path / "wrong_in_a_race.py")
    found = finished(["xsake", "dense", "wrong", "fa4", "mosaic_tpu"])
    assert [row["contestant"] for row in found.rows] == ["xsake", "dense"]
    ours, dense = found.rows
    assert ours["errors"]["out"]["max"] <= ours["errors"]["out"]["allowed_max"] and not dense["errors"]
    assert ours["tflops"] * ours["sustained"]["median"] < dense["tflops"] * dense["sustained"]["median"]
    assert 0.5 < found.density < 1
    assert found.reasons["wrong"].startswith("wrong beside the oracle: out: max error")
    assert "pip install flash-attn-4" in found.reasons["fa4"] and "needs a TPU" in found.reasons["mosaic_tpu"]


def test_fewer_keys_than_queries_race_with_their_gradients():
    worker = InProcess(one.service("1x96x4x16,kv=64x2,causal,block=16", 0.5))
    found = one.run(worker, ["xsake", "xla"], BOTH, rounds=2, limit=60.0)
    assert [set(row["errors"]) for row in found.rows] == 2 * [{"d_query", "d_key", "d_value"}], found.reasons


def test_a_race_without_contestants_says_why():
    with pytest.raises(ValueError, match=r"no contestant can race forward: fa4: .*pip install flash-attn-4"):
        finished(["fa4"])


class Killed(InProcess):
    """A process that one contestant ends, by its n-th call of a method: what was prepared before is lost with it."""

    def __init__(self, during, nth=1):
        super().__init__(one.service(SHAPE, 1.0))
        self._during, self._left = during, nth

    def call(self, method, *arguments, limit):
        if method == self._during and arguments[0] == "dense":
            self._left -= 1
            if self._left == 0:
                self.restarts += 1
                self._service._racers.clear()
                raise Died(f"the process ended during {method} with exit code -11")
        return super().call(method, *arguments, limit=limit)


@pytest.mark.parametrize("killed", [("prepare",), ("turn",), ("turn", 2)])
def test_a_contestant_that_ends_the_process_leaves_the_others(killed):
    """When it is compiled, or in its first or second turn: the others race all rounds."""
    found = finished(["xsake", "dense"], worker=Killed(*killed))
    (row,) = found.rows
    assert row["contestant"] == "xsake" and row["sustained"]["rounds"] == 2 and row["errors"]
    assert found.reasons == {"dense": f"the process ended during {killed[0]} with exit code -11"}


def test_a_contestant_that_cannot_be_prepared_again_falls_out():
    """Also where another contestant ends the process after its last turn."""

    class Once(Killed):
        def call(self, method, *arguments, limit):
            if method == "prepare" and self.restarts and arguments[0] == "xsake":
                raise Died("out of memory")
            return super().call(method, *arguments, limit=limit)

    found = finished(["xla", "xsake", "dense"], worker=Once("turn", 2))
    assert [row["contestant"] for row in found.rows] == ["xla"]
    assert found.reasons["xsake"] == "out of memory" and "dense" in found.reasons


def test_a_gpu_that_does_not_tell_its_power():
    monitor = Monitor(None)
    monitor._samples = [(at, ["1980", "[N/A]", "41", "0x04"]) for at in (1.0, 2.0, 9.0)]
    assert monitor.during([(0.0, 3.0)]) == {"sm_mhz": 1980, "celsius": 41, "throttled_by": ["power cap"], "samples": 2}


def test_the_command(tmp_path, monkeypatch):
    """Without a process of its own, which other tests have."""
    monkeypatch.setattr(isolation, "Worker", InProcess)
    files = ["--json", str(tmp_path / "race.json"), "--chart", str(tmp_path / "race.png")]
    (tmp_path / "in_a_file.py").write_text("forward = 1\n")
    against = f"dense,{tmp_path / 'in_a_file.py'}"
    words = ["race", "--shape", SHAPE, "--density", "0.5", "--against", against, "--rounds", "2", "--gradients"]
    said = CliRunner().invoke(app, [*words, *files], env={"COLUMNS": "150"})
    assert said.exit_code == 0, said.output
    assert said.output.count("dense") == 2 and "forward+backward" in said.output
    assert said.output.count("in_a_file does not race: implementation='in_a_file' is not available here") == 2
    kept = json.loads((tmp_path / "race.json").read_text())
    assert [len(r["rows"]) for r in kept["races"]] == [2, 2] and kept["peak_tflops"] > 0
    assert kept["dtype"] == "float32" and kept["environment"]["versions"]["jax"] == jax.__version__
    assert "forward in float32" in said.output and "the peak is" in said.output
    assert set(kept["races"][1]["rows"][0]["errors"]) == {"d_query", "d_key", "d_value"}
    assert (tmp_path / "race.png").stat().st_size > 1000


def test_no_backend_may_have_a_contestants_name():
    assert set(registry.CONTESTANTS) == {contestants.OURS, *contestants._PEERS}


def test_help_names_every_part_of_a_shape():
    assert options.SHAPE == problem.CALL


def test_wrong_words(tmp_path, monkeypatch):
    for words, says in (
        (["--shape", SHAPE, "--against", "flash"], "contestants ['flash'] are unknown; there are cudnn, dense, fa4"),
        (["--shape", "4096"], "the query's shape '4096' is not right"),
        (["--shape", SHAPE, "--density", "0"], "density=0.0 must be above 0 and at most 1"),
        (["--shape", f"{SHAPE},density=0.5", "--density", "0.1"], "both give a density: leave out one of them"),
        (["--shape", SHAPE, "--json", "no/such/folder/x.json"], "there is no folder"),
    ):
        said = CliRunner().invoke(app, ["race", *words])
        assert said.exit_code == 1 and says in " ".join(said.output.split()), said.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["race", "--shape", SHAPE, "--chart", "x.png"])
    assert said.exit_code == 1 and "matplotlib is not installed" in said.output, "before the race"
    with pytest.raises(ModuleNotFoundError, match="pip install tokamax"):
        contestants._dense("tokamax", is_causal=True)
