"""Races of sparse and dense attention: which race tells of a call, what the policy makes of it, how they are made."""

from __future__ import annotations

import dataclasses
from typing import Any

import hads_case as case
import pytest
from tuning_fakes import ENVIRONMENT
from typer.testing import CliRunner

from benchmarks.hads import races
from xsake import hads, tuning_db
from xsake._cli import app
from xsake._cli.tuning import problems_of
from xsake._measure.environment import Facts
from xsake.autotune.hads import calls
from xsake.autotune.hads.calls import HadsCall
from xsake.autotune.hads.race import decided
from xsake.autotune.measure.contest import Round
from xsake.autotune.search.direction import Settings
from xsake.autotune.write import writer
from xsake.hads.attention.policy import race_key
from xsake.tuning_db import Database, Entry

PROFILE = dataclasses.replace(case.random_profile(), block=64, block_q=64)
TIME = {"median": 1.0, "low": 1.0, "high": 1.0, "rounds": 15}
ALIKE: dict[str, Any] = dict(dtype="float32", implementation="xla")


def entry(kind: Any, keys: int, sparse: bool, density: float = 0.1, **changes: Any) -> Entry:
    sizes = dict(batch=1, q_len=keys, kv_len=keys, density=density) | changes
    key = race_key(PROFILE, kind, **ALIKE, **sizes)
    measured = [{"workload": f"{kind} of {keys}", "density": density, "default": TIME, "tuned": TIME}]
    about = {
        "source": "measured",
        "kernel": "0" * 16,
        "date": "2026-01-01T00:00:00+00:00",
        "speedup": 1.5 if sparse else 0.5,
        "gain": {"low": 0.4, "high": 1.6, "rounds": 15, "waited": 0.0},
        "measured": measured,
        "environment": "e",
        "conditions": {},
    }
    return Entry(key, {"sparse": sparse}, about)


def said(*entries: Entry, attention: hads.Attention | None = None, **call: Any) -> str:
    with tuning_db.overlay(Database("a chip", entries)):
        found = hads.explain(
            attention or hads.Attention(PROFILE, 0.1, decode=0.1), device="a chip", **call, dtype="float32"
        )
    return str(found)


def test_the_nearest_race_that_tells_decides():
    won, lost = entry("prompt", 16384, True), entry("prompt", 8192, False)
    told = "prompt of 16384 had 1.50x the speed of dense attention with 10% of the blocks (raced on a chip; an overlay)"
    assert said(won, lost, queries=16384) == f"10.0% of the blocks: {told}"
    assert said(won, lost, queries=131072) == f"10.0% of the blocks: {told}"
    for length in (4096, 8192, 16383):
        assert said(won, lost, queries=length).startswith("dense: prompt of 8192 had 0.50x"), length
    assert "a guess" in said(lost, queries=16384), "a race that was lost says nothing of twice the size"
    assert "a guess" in said(won, queries=8192), "nor a race that was won of a shorter prompt"
    assert "a guess" in said(won, queries=131072, attention=hads.Attention(PROFILE, 0.3)), "nor of a denser one"
    assert "a guess" in said(won, queries=32768, training=True) and "a guess" in said(won, queries=64, keys=32768)


def test_new_tokens_are_told_by_the_tokens_of_all_sequences():
    won = entry("decode", 8192, True, batch=32, q_len=1)
    lost = entry("decode", 8192, False, batch=8, q_len=1)
    assert said(won, lost, queries=1, keys=65536, batch=4).startswith("10.0% of the blocks: decode of 8192 had 1.50x")
    assert said(won, lost, queries=1, keys=65536).startswith("dense: decode of 8192 had 0.50x")


def test_limits_of_ones_own_and_always_ask_no_race():
    lost = entry("prompt", 131072, False)
    for policy, why in (("always", "always"), (hads.Policy(prompt=1024), "sparse from 1024 tokens on")):
        assert said(lost, queries=65536, attention=hads.Attention(PROFILE, 0.1, policy=policy)).endswith(why)


def test_a_file_of_races_holds_to_the_schema_and_merges(tmp_path):
    path = tmp_path / "a_chip.json"
    writer.merge(path, "a chip", [entry("prompt", 8192, False)], {"e": ENVIRONMENT})
    later = entry("prompt", 8192, True)
    writer.merge(path, "a chip", [later, entry("training", 8192, True)], {"e": ENVIRONMENT})
    assert problems_of(path) == [] and '"schema_version": 3' in path.read_text()
    assert len(Database.read(path)) == 2 and Database.read(path).exact(later.key) == later
    path.write_text(path.read_text().replace('"sparse": true', '"sparse": 1'))
    assert "must say whether it is sparse" in problems_of(path)[0]


def test_the_entries_from_records_are_those_of_the_records():
    shipped = Database.read(races.PATH).entries
    assert [e.json() for e in shipped if e.about["source"] == "record"] == [
        e.json() for e in Database("", races.entries()[0]).entries
    ]


def test_what_an_h200_runs():
    def runs(profile: hads.HadsProfile, **call: Any) -> str:
        return str(hads.explain(hads.Attention(profile, 0.2, decode=0.1), device="NVIDIA H200", **call))

    small = hads.HadsProfile.shipped("smollm2", 8192)
    assert runs(small, queries=8192).startswith("dense: smollm2-135m reading a prompt of 8192 tokens, ")
    assert "had 0.80x the speed of dense attention with 20% of the blocks (from benchmarks/results/gpu_prompt" in runs(
        small, queries=8192
    )
    large = hads.HadsProfile.shipped("qwen2.5-coder-1.5b", 32768)
    assert runs(large, queries=32768).startswith("20.0% of the blocks: ")
    assert runs(large, queries=1, keys=32768, batch=8).startswith("dense: qwen2.5-1.5b writing after 8 x 32768")
    assert runs(large, queries=1, keys=32768, batch=32).startswith("10.0% of the blocks: qwen2.5-1.5b writing")


def test_races_from_the_command_line(tmp_path, monkeypatch):
    profile = dataclasses.replace(case.ONE_LAYER, model="tiny")
    profile.save(tmp_path / "profile.json")
    monkeypatch.setattr(calls, "_SIZES", {"cpu": {kind: ((256,), (1,)) for kind in calls.KINDS}})
    monkeypatch.setattr(calls, "KINDS", ("prompt",))
    monkeypatch.setattr(Settings, "final_rounds", 8)
    monkeypatch.setattr("xsake.autotune.hads.race.disturbance", lambda times, contended: None)
    options = ["--densities", "0.7", "--profile", str(tmp_path / "profile.json"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["autotune", "--hads", "--no-isolate", *options])
    assert result.exit_code == 0, result.output
    assert "a prompt of 256 tokens, 4/2 heads of 16, blocks of 16 x 16, 70%: " in result.output
    path = tmp_path / "cpu.json"
    assert problems_of(path) == []
    assert [e.key.direction for e in Database.read(path).entries] == ["prompt"]
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(app, ["info", "--hads", "--profile", str(tmp_path / "profile.json"), "--tokens", "256"])
    assert "a prompt of 256 tokens, 4/2 heads of 16, blocks of 16 x 16 had " in shown.output, shown.output
    pruned = CliRunner().invoke(app, ["tuning", "prune", str(path)])
    assert pruned.output.endswith("0 stale entries dropped, 1 kept\n"), pruned.output


def test_a_busy_machine_gives_no_verdict(monkeypatch):
    worker = _Worker()
    monkeypatch.setattr("xsake.autotune.hads.race.disturbance", lambda times, contended: "it is busy")
    call = HadsCall(kind="prompt", profile=PROFILE, batch=1, queries=8192, keys=8192, budget=0.1, dtype="float32")
    facts = Facts("cpu", "cpu", ENVIRONMENT)
    for ratio, written in ((1.4, False), (2.0, True), (0.5, True)):
        worker.ratio = ratio
        outcome = decided(call, worker, facts, rounds=8, limit=60.0)
        assert (outcome.entry is not None) == written
        assert (outcome.busy is None) == written


class _Worker:
    """A worker whose dense attention takes `ratio` times as long as its sparse attention."""

    ratio, restarts = 1.0, 0

    def call(self, method: str, *arguments: Any, limit: float) -> Any:
        return "xla" if method == "open" else Round([self.ratio, 1.0])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hads", "--trials", "9"], "leave out --trials"),
        (["--hads", "--refresh", "--blocks", "64"], "leave out --blocks"),
        (["--profile", __file__], "--profile is for --hads"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    result = CliRunner().invoke(app, ["autotune", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_info_of_hads_has_options_of_its_own():
    result = CliRunner().invoke(app, ["info", "--tokens", "64"])
    assert result.exit_code == 1 and "--tokens is for --hads" in result.output, result.output
