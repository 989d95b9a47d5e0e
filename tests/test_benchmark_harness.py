"""What all benchmark scripts share: cases, options, records that grow, races in two parts."""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from benchmarks import record
from benchmarks.harness import race, script
from benchmarks.harness.case import BOTH, DIRECTIONS, FORWARD, Case, in_direction
from benchmarks.harness.contestant import dense, largest_difference, sparse
from benchmarks.harness.masks import CALLS
from benchmarks.harness.nvidia_smi import Monitor
from xsake.autotune.workloads import Workload

SMALL = Workload(name="small", batch=1, q_heads=2, kv_heads=1, length=64, head_dim=8, is_causal=True, block=16)


def test_contestants_of_a_case_compute_the_same():
    mask = xsake.patterns.causal(64, 64, block_q=16, block_kv=16)
    for direction in DIRECTIONS:
        one, many = (Case(SMALL, direction, jnp.float32, calls) for calls in (1, None))
        assert many.calls == 8 and len(one.given) == (3 if direction == FORWARD else 4)
        ours = one.contestant(sparse, mask)()
        assert len(jax.tree.leaves(ours)) == (1 if direction == FORWARD else 3)
        assert largest_difference(one.compiled(dense("xla"))(), ours) < 1e-5
        assert largest_difference(many.contestant(sparse, mask)(), ours) == 0.0


def test_gradients_come_with_the_output():
    case = Case(SMALL, BOTH, jnp.float32)
    out, gradients = in_direction(dense("xla"), BOTH)(*case.given)
    assert out.shape == case.cotangent.shape and [g.shape for g in gradients] == [x.shape for x in case.inputs]


def test_a_case_counts_its_direction():
    assert Case(SMALL, BOTH).flops() == 3.5 * Case(SMALL).flops() == 3.5 * SMALL.flops()


def test_options_say_where_the_record_goes():
    options = script.parser("What it does.", rounds=3, dense=True)
    assert options.parse_args([]).out is None
    assert options.parse_args(["--record"]).out == record.RESULTS
    given = options.parse_args(["--out", "there", "--rounds", "2", "--dense", "xla"])
    assert (str(given.out), given.rounds, given.dense) == ("there", 2, "xla")


def test_values_between_commas():
    assert script.listed(int)("1,8") == [1, 8] and script.listed()("") == []
    with pytest.raises(argparse.ArgumentTypeError, match="c is not one of a, b"):
        script.listed(among=("a", "b"))("a,c")
    with pytest.raises(argparse.ArgumentTypeError, match="gpt5 is not one of llama32k, full16k, gpt4k"):
        script.listed(among=CALLS)("gpt5")


def test_a_record_is_written_as_it_grows(tmp_path):
    rows = script.Record("some", tmp_path, settings={"heads": 2})
    for number in range(2):
        rows.add({"number": number})
        written = json.loads((tmp_path / "some.json").read_text())
        assert written["results"] == rows and written["environment"]["settings"] == {"heads": 2}
    script.Record("none", None).add({"number": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


def test_a_command_is_recorded_without_the_folders_of_the_machine(monkeypatch, tmp_path):
    words = [str(record.ROOT / "benchmarks" / "gpu" / "peers.py"), "--out", str(tmp_path / "there")]
    monkeypatch.setattr("sys.argv", words)
    assert record.environment()["command"] == "benchmarks/gpu/peers.py --out there"


def test_turns_have_a_burst_and_go_on(monkeypatch):
    monkeypatch.setattr(race, "PAUSE", 0.0)
    monkeypatch.setattr(race, "BURST", 1e-4)
    monkeypatch.setattr(race, "SUSTAINED", 2e-4)
    waited: list[np.ndarray] = []
    found = race.sustained_race({"a": lambda: np.zeros(1), "b": lambda: np.ones(1)}, 3, waited.append, Monitor())
    assert list(found) == ["a", "b"] and waited
    row = race.sustained_row(found["a"], calls=8, flops=1e12)
    assert row["burst"]["rounds"] == row["sustained"]["rounds"] == 3 and row["chip"] == {}
    assert row["tflops"] == pytest.approx(1 / row["sustained"]["median"])


def test_races_are_run_in_turn_and_recorded_by_workload(tmp_path):
    class Race:
        def __init__(self, name):
            self.workload = Workload(**{**vars(SMALL), "name": name})

        def run(self, rounds, wait, monitor):
            return [{"rounds": rounds, "of": self.workload.name}]

    shown: list[str] = []
    options = dict(rounds=2, show=lambda rows: shown.append(rows[0]["of"]))
    race.run_all([Race("one"), Race("other"), Race("one")], "gpu_x", tmp_path, **options)
    assert shown == ["one", "other", "one"]
    assert [len(json.loads((tmp_path / f"gpu_x_{n}.json").read_text())["results"]) for n in ("one", "other")] == [2, 1]
    race.run_all([Race("one")], "gpu_x", None, seconds=-1.0, **options)
    assert len(shown) == 3, "no race begins after the time is over"
