"""What all benchmark scripts share: courses, contestants that are checked, masks, options, records that grow, races."""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from benchmarks import record
from benchmarks.harness import contestants, masks, race, sanitizer, script
from benchmarks.harness.contestants import largest_difference
from xsake._measure.nvidia_smi import Monitor
from xsake._race import sustained
from xsake._race.contestants import dense, sparse
from xsake._race.course import BOTH, DIRECTIONS, FORWARD, Course, in_direction
from xsake.autotune.workloads import Workload

SMALL = Workload(name="small", batch=1, q_heads=2, kv_heads=1, length=64, head_dim=8, is_causal=True, block=16)
X = jnp.arange(1.0, 5.0)
OURS = {"output": 2 * X}
UNSUPPORTED = "their kernel takes no such call"


def test_contestants_of_a_case_compute_the_same():
    mask = xsake.patterns.causal(64, 64, block_q=16, block_kv=16)
    for direction in DIRECTIONS:
        one, many = (Course(SMALL, direction, jnp.float32, calls) for calls in (1, None))
        assert many.calls == 8 and len(one.given) == (3 if direction == FORWARD else 4)
        ours = one.contestant(sparse, mask)()
        assert len(jax.tree.leaves(ours)) == (1 if direction == FORWARD else 3)
        assert largest_difference(one.compiled(dense("xla"))(), ours) < 1e-5
        assert largest_difference(many.contestant(sparse, mask)(), ours) == 0.0


def test_gradients_come_with_the_output():
    course = Course(SMALL, BOTH, jnp.float32)
    out, gradients = in_direction(dense("xla"), BOTH)(*course.given)
    assert out.shape == course.cotangent.shape and [g.shape for g in gradients] == [x.shape for x in course.inputs]


def test_a_case_counts_its_direction():
    assert Course(SMALL, BOTH).flops() == 3.5 * Course(SMALL).flops() == 3.5 * SMALL.flops()


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
        script.listed(among=masks.CALLS)("gpt5")


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
    monkeypatch.setattr(sustained, "PAUSE", 0.0)
    monkeypatch.setattr(sustained, "BURST", 1e-4)
    monkeypatch.setattr(sustained, "SUSTAINED", 2e-4)
    waited: list[np.ndarray] = []
    found = sustained.sustained_race(
        {"a": lambda: np.zeros(1), "b": lambda: np.ones(1)}, 3, waited.append, Monitor(None)
    )
    assert list(found) == ["a", "b"] and waited
    row = sustained.sustained_row(found["a"], calls=8, flops=1e12)
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


def right(x):
    return 2.0 * x


def wrong(x):
    return 3.0 * x


def failing(*given):
    raise RuntimeError(UNSUPPORTED)


def checked(function):
    return contestants.checked(function, (X,), OURS)


def test_a_contestant_that_agrees_is_raced():
    found = checked(right)
    assert found.run is not None and found.words is None and found.differences == {"output": 0.0}
    np.testing.assert_array_equal(found.run(), 2 * X)


def test_a_wrong_contestant_is_not_raced():
    found = checked(wrong)
    assert found.run is None and found.words.endswith("it differs in output by 5.0e-01")
    assert checked(lambda x: x * jnp.nan).run is None
    assert checked(lambda x: x[:2]).run is None


def test_a_failure_is_told_and_kept_short():
    words = f"it fails: RuntimeError: {UNSUPPORTED}"
    assert checked(failing).recorded() == {"raced": False, "words": words, "differences": None, "variant": None}
    assert len(contestants.told(ValueError("x" * 10_000))) < contestants.MOST_CHARACTERS + 10


def test_the_fastest_is_of_the_right_variants():
    variants = {"bad": wrong, "good": right, "none": failing, "also good": lambda x: x + x}
    found = contestants.fastest(variants, (X,), OURS)
    assert found.run is not None and found.variant in ("good", "also good")
    assert contestants.fastest({"none": failing, "bad": wrong}, (X,), OURS).variant == "none"


class Tensor:
    """As much of torch's as a race asks for."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self.array


@pytest.mark.parametrize("off", [0.0, 0.01, 0.1, np.nan])
def test_a_peer_with_other_results_is_not_raced(off):
    ours = tuple(jnp.full((2, 3), value, jnp.bfloat16) for value in (1.0, 2.0))
    raced, where = {"xsake": lambda: ours}, "smollm8k, forward+backward, random 43%"
    contestants.check_agreement(raced, "xsake", "fa4", where)  # without a peer there is nothing to compare
    raced["fa4"] = lambda: (Tensor(ours[0]), Tensor(ours[1] * jnp.bfloat16(1 + off)))
    if off <= 0.01:
        contestants.check_agreement(raced, "xsake", "fa4", where)
        return
    with pytest.raises(ValueError, match=r"smollm8k, forward\+backward, random 43%: relative to the norms"):
        contestants.check_agreement(raced, "xsake", "fa4", where)


@pytest.mark.parametrize("sizes", [(256, 16, 64), (250, 16, 64), (256, 64, 128), (200, 64, 16)])
def test_pairs_are_counted_as_the_mask_says(sizes):
    tokens, block_q, block_kv = sizes
    shape = dict(block_q=block_q, block_kv=block_kv, heads=2, is_causal=True)
    mask = xsake.patterns.random(tokens, tokens, density=0.4, seed=0, **shape)
    assert masks.pairs(mask) == np.asarray(mask.to_elements()).sum() / (2 * tokens)


def test_masks_of_hads_are_raced_beside_random_ones_of_as_many_blocks():
    raced, small = masks.masks_of(masks.HADS), masks.hads_blocks()
    for name, blocks in small.items():
        chosen, drawn = (np.asarray(raced[n].to_blocks())[0] for n in (name, f"random, as {name}"))
        assert chosen.shape == (masks.HADS.q_heads, 64, 64) and (chosen.sum((1, 2)) == drawn.sum((1, 2))).all()
        assert chosen.diagonal(axis1=1, axis2=2).all() and drawn.diagonal(axis1=1, axis2=2).all()
        own = np.asarray(masks.with_small_blocks(masks.HADS, name).to_blocks())[0]
        np.testing.assert_array_equal(own, blocks)
        np.testing.assert_array_equal(chosen, own.reshape(-1, 64, 2, 64, 2).any((2, 4)))
    assert len(raced) == 2 * len(small) == 6


@pytest.mark.parametrize(
    ("said", "code", "errors", "warnings"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0, 0),
        ("========= ERROR SUMMARY: 2 errors", 1, 2, 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 1, 2, 1),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", 0, 0, 1),
        ("========= ERROR SUMMARY: 0 errors", 1, None, 0),
        ("no such tool", 127, None, 0),
    ],
)
def test_what_the_sanitizer_says_is_counted(said, code, errors, warnings):
    assert sanitizer.errors_in(said, code) == errors and sanitizer.warnings_in(said) == warnings
