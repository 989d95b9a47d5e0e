"""`benchmarks.train.gpu` on a tiny model: what is raced and recorded, what stays, and what readers make of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from training import MODEL

from benchmarks import plan_rates, record
from benchmarks.report import model as report
from benchmarks.train import gpu as train_gpu
from xsake.dashboard.show.benchmark_plots import plots
from xsake.model.training.trainer import Trainer

KINDS = ["dense", "sparse", "hads"]
SMALL = ["--skip-training", "--only", "tiny", "--tokens-per-step", "128", "--block", "4", "--dense", "xsake"]
SMALL += ["--rounds", "2"]


class Uncompiled(Trainer):
    """Reads its batches, and computes nothing."""

    log: list[tuple[str, int, str]] = []

    def begin(self):
        self.state, self.taken = None, 0
        self._note("begin")

    def step(self):
        assert self._next_batch().shape == (1, self.config.batch, self.config.length + 1)
        self.taken += 1
        self._note("step")
        return np.float32(0)

    def _note(self, what):
        self.log.append((self.config.attention, self.config.length, what))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The options of a small run, and its folder."""
    monkeypatch.setitem(train_gpu.PRESETS, "tiny", MODEL)
    monkeypatch.setattr(train_gpu, "TURN_SECONDS", 0.01)
    return [*SMALL, "--out", str(tmp_path)], tmp_path


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(train_gpu, "Trainer", Uncompiled)
    monkeypatch.setattr(train_gpu, "precompile", lambda trainer: None)
    monkeypatch.setattr(Uncompiled, "log", [])
    return Uncompiled.log


def summary(folder):
    return json.loads((folder / "train_gpu.json").read_text())


def test_steps_are_raced_per_length_and_resumed(tiny, uncompiled, monkeypatch):
    options, folder = tiny
    train_gpu.main([*options, "--lengths", "64"])
    assert {what for _, _, what in uncompiled[:3]} == {"begin"}, "every kind has its masks before the first step"
    assert {what for _, _, what in uncompiled[3:]} == {"step"}
    uncompiled.clear()
    train_gpu.main([*options, "--lengths", "64,128"])
    assert {length for _, length, _ in uncompiled} == {128}, "what was done before is not run again"
    assert not list(folder.glob("*.jsonl"))

    run = summary(folder)
    assert [(r["kind"], r["length"]) for r in run["results"]] == [(k, n) for n in (64, 128) for k in KINDS]
    for row in run["results"]:
        names = ["preset", "kind", "length", "density", "config", "seconds", "tokens_per_second", "mfu"]
        assert list(row) == names and set(row["seconds"]) == {"median", "low", "high", "rounds"}
        assert row["tokens_per_second"] == pytest.approx(128 / row["seconds"]["median"])
        assert row["config"]["recalibrate_every"] == 0 and row["config"]["batch"] == 128 // row["length"]
    monkeypatch.setattr(record, "RESULTS", folder)
    text = report.train_gpu()
    assert "| tiny | 64 | dense (XSAKE) |" in text and "| tiny | 128 | HADS | 43% |" in text
    assert "Steps at 64 and 128 tokens were raced" in text and "after the other" not in text
    assert plots("train_gpu", run)[0][0]["x"]["categories"] == ["tiny, 64 tokens", "tiny, 128 tokens"]


def test_other_options_are_another_race(tiny, uncompiled):
    options, folder = tiny
    train_gpu.main([*options, "--lengths", "64", "--kinds", "dense,sparse"])
    train_gpu.main([*options, "--lengths", "64", "--kinds", "dense,hads"])
    assert [r["kind"] for r in summary(folder)["results"]] == ["dense", "hads"], "ratios come from one race"
    train_gpu.main([*options, "--lengths", "64", "--kinds", "dense,hads", "--block", "2"])
    assert [r["config"]["block"] for r in summary(folder)["results"]] == [2, 2]


def test_the_skipped_part_stays(tiny, uncompiled, monkeypatch):
    """New step times replace all old ones, and recorded whole runs stay, with their own commits."""
    options, folder = tiny
    before = record.load("train_gpu")
    (folder / "train_gpu.json").write_text(json.dumps(before))
    train_gpu.main([*options, "--lengths", "64"])
    rows = summary(folder)["results"]
    whole = [r for r in before["results"] if "held_out_loss" in r]
    assert rows[: len(whole)] == [{"environment": before["environment"]} | r for r in whole]
    assert [r["length"] for r in rows[len(whole) :]] == [64, 64, 64]
    monkeypatch.setattr(record, "RESULTS", folder)
    text = report.train_gpu()
    assert "Steps at 64 tokens were raced" in text and "Steps at 4096 tokens were timed one kind" in text
    assert "Some rows are of an earlier run; the record names it." in text


def test_plans_take_neither_hads_nor_steps_that_are_mostly_attention(monkeypatch):
    run, points = record.load("train_gpu"), plan_rates.attention_points()
    load, before = record.load, plan_rates.rest_of_steps(points)
    dense = next(r for r in run["results"] if (r["preset"], r["kind"], r["length"]) == ("small", "dense", 8192))
    long = dense | {"length": 32768, "config": dense["config"] | {"batch": 2}}
    seconds = {"median": 0.3, "low": 0.3, "high": 0.3, "rounds": 5}
    more = [dense | {"kind": "hads", "config": dense["config"] | {"attention": "hads"}}, long | {"seconds": seconds}]
    changed = run | {"results": [*run["results"], *more]}
    monkeypatch.setattr(record, "load", lambda name: changed if name == "train_gpu" else load(name))
    assert plan_rates.rest_of_steps(points) == before


def test_the_steps_of_a_gpu_fit_its_presets():
    args = train_gpu.parsed(["--skip-training"])
    assert args.lengths == [8192, 32768] and args.only == ["small", "gpt2-124m"] and args.kinds == KINDS
    for length, batch in ((8192, 8), (32768, 2)):
        config = train_gpu.configuration("gpt2-124m", "hads", length, args)
        assert (config.batch, config.tokens_per_step, config.recalibrate_every) == (batch, 65536, 0)
    run = train_gpu.configuration("small", "hads", train_gpu.RUN_LENGTH, args)
    assert run.recalibrate_every == -(-run.steps // 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "whole runs need DATA"),
        (["--skip-training", "--lengths", "4096"], "--lengths 4096: whole runs have this length"),
        (["--skip-training", "--lengths", "10000"], "--tokens-per-step 65536 must be a multiple of 10000 tokens"),
        (["--skip-training", "--kinds", "dens"], "--kinds: dens is not one of dense, sparse, hads"),
    ],
)
def test_wrong_calls_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        train_gpu.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_race(tiny):
    options, folder = tiny
    train_gpu.main([*options, "--lengths", "64"])
    assert [r["kind"] for r in summary(folder)["results"]] == KINDS
