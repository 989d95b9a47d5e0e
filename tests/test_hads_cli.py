"""`xsake calibrate`, `xsake evaluate`, and the texts that they read."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import hads_case as case
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from xsake._cli import app
from xsake._cli import hads as cli
from xsake._ground.progress import shown_progress
from xsake.hads import HadsProfile
from xsake.hads.study.bootstrap import Difference
from xsake.hads.study.result import table
from xsake.hads.study.summary import Summary, retention
from xsake.hads.study.texts import load_texts
from xsake.model import save_pretrained


def encode(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    filler = rng.integers(0, 500, (3, 300)).astype(np.uint16)
    items = np.zeros((1, 300), np.uint16)
    items[0, -9:-1] = np.arange(1, 9)  # each of the last eight tokens is an answer
    path = tmp_path / "tokens.npz"
    arrays = {"calm": filler[:1], "lively": filler[1:], "copy": filler[2:], "copy.items": items}
    np.savez(path, **arrays)
    return path


@pytest.mark.slow  # what it prints is tested with the calibration
def test_a_dry_run_tells_the_memory_and_writes_nothing(tokens: Path, tmp_path: Path):
    save_pretrained(case.tiny_model(), tmp_path / "model")
    options = ["--out", tmp_path / "profile.json", "--model", tmp_path / "model", "--length", 300, "--block", 16]
    code, said = run("calibrate", tokens, *options, "--dry-run")
    assert code == 0, said
    assert "4 sequences of 300 tokens" in said and "on the device at most" in said and "on the host" in said
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.slow
def test_calibrate_and_evaluate(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = case.tiny_model()
    monkeypatch.setattr(cli, "_load", lambda *_, **__: (model, encode))
    profile, out = tmp_path / "profile.json", tmp_path / "out"
    code, said = run("calibrate", tokens, "--out", profile, "--length", 300, "--block", 16, "--domains", "calm")
    assert code == 0, said
    assert "1 sequences of 300 tokens from calm" in said and "blocks of 16, calibrated on 1 x 300" in said
    assert "sensitivity of heads: 1 of 1, after" in said and not profile.with_name("profile.json.part").exists()
    assert HadsProfile.load(profile).model == "smollm2"

    options = ["--profile", profile, "--out", out, "--methods", "hads,sink_window", "--budgets", "0.5"]
    code, said = run("evaluate", tokens, *options, "--length", 300, "--domains", "lively,copy")
    assert code == 0, said
    assert "HADS at 50%: 0 of 3, after" in said and "sink + window" in said and "50.00%" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "heads.png",
        "mask.png",
        "quality.png",
        "records.jsonl",
        "summary.json",
    ]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["about"] == {"model": "smollm2", "length": 300, "block": 16, "dtype": "float32"}
    assert {row["method"]: row["sequences"] for row in summary["methods"]} == {"hads": 2, "sink_window": 2}
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()[1:]]
    copies = [line for line in lines if line["domain"] == "copy"]
    assert [line["asked"] for line in copies] == [8, 8] and all(0 <= x["dropped"] <= x["carriers"] for x in copies)
    assert {(one["domain"], one["method"]) for one in summary["carriers"]} <= {
        ("copy", "hads"),
        ("copy", "sink_window"),
    }

    code, said = run("evaluate", tokens, *options, "--length", 256, "--domains", "calm")
    assert code == 1 and "holds a run of" in said and "give another --out" in said
    other = [*options[:3], tmp_path / "other", *options[4:]]
    code, said = run("evaluate", tokens, *other, "--length", 300, "--domains", "calm")
    assert code == 1 and "the profile was calibrated on calm/0 (100% of it): evaluate on other texts" in said
    code, said = run("evaluate", tokens, *other, "--model", "another.gguf")
    assert code == 1 and "is the profile of 'smollm2', not of 'another': calibrate this model" in said
    code, said = run("evaluate", tokens, *other, "--methods", "nonsense")
    assert code == 1 and "unknown ['nonsense']; groups are short, ours, rivals" in said


def test_a_length_beyond_the_context_is_refused_before_anything_is_written(tokens: Path, tmp_path: Path):
    """What it left behind would refuse the mended command."""
    model, profile, out = tmp_path / "model", tmp_path / "profile.json", tmp_path / "out"
    save_pretrained(case.tiny_model(), model)
    dataclasses.replace(case.random_profile(), model="model").save(profile)
    for words in (
        ["calibrate", tokens, "--out", out],
        ["calibrate", tokens, "--out", out, "--dry-run"],
        ["evaluate", tokens, "--out", out, "--profile", profile],
    ):
        code, said = run(*words, "--model", model, "--length", 4096)
        assert code == 1 and "--length 4096 is beyond the model's context of 512\n" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "profile.json", "tokens.npz"]


def test_the_table_of_an_evaluation_is_whole_in_80_columns():
    about = dict(budget=0.1, layers="profile", sequences=256, documents=9, density=0.1, off_budget=0.0)
    found = dict(kl=0.1323, perplexity_gap=0.1432, same_token=0.871, adjusted=None)
    against = {"hads": None, "mean_top_k+forced": Difference(-0.0123, -0.0222, -0.0012, 0.0)}
    rows = [Summary(method=name, against=of, **about, **found) for name, of in against.items()]
    console = Console(width=80, file=io.StringIO())
    console.print(table(rows, "smollm2-135m, 131072 tokens in blocks of 128: distance from the dense model"))
    lines = console.file.getvalue().splitlines()
    assert "…" not in "".join(lines) and len(max(lines, key=len)) <= 80
    words = " ".join(lines).split()
    assert {"perplexity", "mean-pooled", "texts", "256", "[-0.0222,", "-0.0012]", "-0.0123", "+14.32%"} <= set(words)


def test_progress_in_a_log_is_lines(capsys, monkeypatch):
    """At the start and at the end of each work, and every few seconds between them."""
    seconds = iter(range(0, 100, 4))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    with shown_progress() as progress:
        for done in range(6):
            progress("heads of each layer", done, 5)
        progress("sensitivity of heads", 0, 2)
    assert capsys.readouterr().out.splitlines() == [
        "heads of each layer: 0 of 5, after 4 s",
        "heads of each layer: 3 of 5, after 16 s",
        "heads of each layer: 5 of 5, after 24 s",
        "sensitivity of heads: 0 of 2, after 28 s",
    ]


def test_texts(tokens: Path, tmp_path: Path):
    plain = tmp_path / "plain.txt"
    plain.write_text("abc" * 100)
    texts = load_texts([tokens, plain], length=100, limit=1, encode=encode)
    assert [text.name for text in texts] == ["calm/0", "lively/0", "plain/0"]  # questions stand at the end of the whole
    assert texts[2].tokens.tolist() == encode("abc" * 100)[:100]
    assert len({text.digest for text in texts}) == 3
    whole = load_texts([tokens], length=300, domains=["copy"])
    assert whole[0].items.max() == 8
    with pytest.raises(ValueError, match=r"plain\.txt is plain text: it needs the model's tokenizer"):
        load_texts([plain], length=10)
    with pytest.raises(ValueError, match=r"no texts of \['odd'\]; there are calm, copy, lively"):
        load_texts([tokens], length=300, domains=["odd"])
    with pytest.raises(ValueError, match="no text has 400 tokens"):
        load_texts([tokens], length=400)
    np.savez(tmp_path / "bad.npz", odd=np.zeros(3))
    with pytest.raises(ValueError, match=r"odd must be tokens \[N, T\]; got float64\(3,\)"):
        load_texts([tmp_path / "bad.npz"], length=10)
    for content in (b"garbage", tokens.read_bytes()[:200]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.npz is not a file of arrays \(\.npz\), or is damaged"):
            load_texts([tmp_path / "bad.npz"], length=10)
    plain.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"plain\.txt is not UTF-8 text: see its byte 3"):
        load_texts([plain], length=10, encode=encode)


def test_retention():
    line = {"domain": "copy", "method": "hads", "budget": 0.2, "asked": 8}
    lines = [line | {"dense_right": 6, "both_right": 5}, line | {"dense_right": 4, "both_right": 4}]
    assert retention(lines) == [("copy", "hads", 0.2, 10, 0.9)]
