"""`benchmarks.gpu_generate` on a tiny model: what is recorded, and what the report makes of it."""

from __future__ import annotations

import json

import hads_case as case
import numpy as np
import pytest

from benchmarks import gpu_generate, record
from benchmarks.report import generate

pytestmark = pytest.mark.xdist_group("model")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The arguments of a small run, and its folder."""
    folder = tmp_path_factory.mktemp("generate")
    case.random_profile(head_dim=16).save(folder / "profile.json")
    tokens = np.random.default_rng(0).integers(0, 512, (2, 256)).astype(np.uint16)
    np.savez(folder / "texts.npz", letters=tokens)
    options = ["--preset", "tiny", "--profile", f"{folder / 'profile.json'}", "--length", "256", "--new-tokens", "4"]
    return [*options, "--out", f"{folder}"], folder


def test_times(small, monkeypatch):
    options, folder = small
    gpu_generate.main([*options, "--batches", "2", "--budgets", "0.5", "--rounds", "1"])
    [row] = json.loads((folder / "gpu_generate.json").read_text())["results"]
    assert row["batch"] == 2 and list(row["seconds"]) == ["dense", "HADS 50%"]
    assert row["bytes"]["cache"] == 2 * 2 * 2 * 256 * 2 * 16 * 2  # K and V, layers, batch, tokens, heads, D, bytes
    monkeypatch.setattr(record, "RESULTS", folder)
    assert f"| 2 | {2 / row['seconds']['dense']['median']:.0f} (" in generate.times()


def test_quality(small, monkeypatch):
    options, folder = small
    texts = ["--texts", f"{folder / 'texts.npz'}", "--domains", "letters"]
    gpu_generate.main([*options, *texts, "--budgets", "0.5,1"])
    rows = json.loads((folder / "gpu_generate_quality.json").read_text())["results"]
    assert [(row["text"], row["prompt"]) for row in rows] == [("letters/0", 252), ("letters/1", 252)]
    for row in rows:
        half, whole = row["budgets"]
        assert half["low"] <= half["median"] <= half["high"] <= half["largest"]
        assert half["kl"] > 1e-7 > abs(whole["kl"]) and whole["same_token"] == 1  # all blocks: dense attention
    monkeypatch.setattr(record, "RESULTS", folder)
    mean = np.mean([row["budgets"][0]["kl"] for row in rows])
    assert f"| **all (2)** | {mean:.4f} | " in generate.quality()


def test_without_a_record_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert generate.times() == generate.quality() == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--length", "1024"], "--length 1024 is beyond the model's context of 512"),
        (["--new-tokens", "256"], "--new-tokens 256 must be at least 1 and below the 256 tokens of --length"),
    ],
)
def test_wrong_calls_are_refused(small, capsys, more, message):
    with pytest.raises(SystemExit):
        gpu_generate.main([*small[0], *more])
    assert message in " ".join(capsys.readouterr().err.split())
