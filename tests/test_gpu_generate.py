"""`benchmarks.gpu.generate` on a tiny model: what is recorded, and what the report makes of it."""

from __future__ import annotations

import json

import hads_case as case
import numpy as np
import pytest
from tiny_model import build

from benchmarks import record
from benchmarks.gpu import generate as gpu_generate
from benchmarks.report import generation
from xsake.dashboard.show.benchmark_plots import plots

pytestmark = pytest.mark.xdist_group("model")


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(autouse=True)
def made_once(monkeypatch, model):
    monkeypatch.setattr(gpu_generate, "make", lambda config: model)  # its initial weights are a program of seconds


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The arguments of a small run, and its folder."""
    folder = tmp_path_factory.mktemp("generate")
    case.random_profile(head_dim=16).save(folder / "profile.json")
    tokens = np.random.default_rng(0).integers(0, 512, (2, 256)).astype(np.uint16)
    np.savez(folder / "texts.npz", letters=tokens)
    options = ["--preset", "tiny", "--profile", f"{folder / 'profile.json'}", "--length", "256", "--new-tokens", "4"]
    return [*options, "--out", f"{folder}"], folder


@pytest.mark.slow  # the quality below runs the same programs
def test_times(small, monkeypatch):
    options, folder = small
    gpu_generate.main([*options, "--batches", "2", "--budgets", "0.5", "--rounds", "1"])
    run = json.loads((folder / "gpu_generate.json").read_text())
    [row] = run["results"]
    assert row["batch"] == 2 and list(row["seconds"]) == ["dense", "HADS 50%"]
    assert row["bytes"]["cache"] == 2 * 2 * 2 * 256 * 2 * 16 * 4  # K and V, layers, batch, tokens, heads, D, bytes
    monkeypatch.setattr(record, "RESULTS", folder)
    assert f"| 2 | {2 / row['seconds']['dense']['median']:.0f} (" in generation.gpu_generate()
    assert [one["name"] for one in plots("gpu_generate", run)[0][0]["series"]] == ["dense", "HADS 50%"]


def quality_of(small, budget):
    options, folder = small
    gpu_generate.main([*options, "--texts", f"{folder / 'texts.npz'}", "--domains", "letters", "--budgets", budget])
    run = json.loads((folder / "gpu_generate_quality.json").read_text())
    assert plots("gpu_generate_quality", run)[0][0]["x"]["categories"] == ["letters/0", "letters/1"]
    return run["results"]


@pytest.mark.slow
def test_quality(small, monkeypatch):
    rows = quality_of(small, "0.5")
    assert [(row["text"], row["prompt"]) for row in rows] == [("letters/0", 252), ("letters/1", 252)]
    for row in rows:
        of_tokens = row["kl_of_tokens"]
        assert of_tokens["low"] <= of_tokens["median"] <= of_tokens["high"] <= row["largest_kl"]
    assert min(row["kl"] for row in rows) > 1e-3
    monkeypatch.setattr(record, "RESULTS", small[1])
    assert f"| **all** | {np.mean([row['kl'] for row in rows]):.4f} | " in generation.gpu_generate_quality()


@pytest.mark.slow
def test_all_blocks_are_dense_attention(small):
    for row in quality_of(small, "1"):
        assert abs(row["kl"]) < 1e-6 and row["same_token"] == 1


def test_without_a_record_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert generation.gpu_generate() == generation.gpu_generate_quality() == ""


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
