"""The study, stage by stage on a tiny model: the files it leaves, and that it goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import hads_case as case
import numpy as np
import pytest

from benchmarks.hads import stages, tasks, texts
from benchmarks.hads.compile_ahead import compile_evaluation
from benchmarks.hads.methods import RIVALS, STRENGTHENED
from benchmarks.hads.pretrained import join
from benchmarks.hads.settings import LONG_METHODS, Settings
from benchmarks.hads.study import Study
from benchmarks.hads.texts import CALIBRATION, EVALUATION
from xsake.hads.study.records import read
from xsake.model import Transformer

LENGTH = 256
SETTINGS = Settings(
    length=LENGTH,
    block=16,
    batch=4,
    calibration_sequences=1,
    sequences=2,
    name="tiny",
    screened=8,
    methods=(
        "hads",
        "hads_equal_heads",
        "oracle_top_k",
        "sliding_window",
        "sliding_window+forced",
        "hads_v1",
        "x_attention_8_heads",
        "minference",
        "kascade+forced",
    ),
    budgets=(0.4, 0.6),
    task_budgets=(0.4,),
    seed={"sliding_window": 0.4, "hads": 0.6},
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    arrays = {name: rng.integers(0, 500, (2, LENGTH)).astype(np.uint16) for name in (*CALIBRATION, *EVALUATION)}
    for name in tasks.NAMES:
        asked, items = tasks.copy(arrays["prose"][0].astype(np.int32), rng, span=16)
        arrays |= {f"{name}-{LENGTH}": asked[None], f"{name}-{LENGTH}.items": items[None]}
    np.savez(folder / "texts.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def model() -> Transformer:
    return case.tiny_model()


@pytest.mark.slow
def test_a_stage_goes_on_where_it_stopped(inputs: Path, model: Transformer, tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, methods=("hads", "sink_window", "sink_window+forced"))
    profile = case.random_profile(head_dim=16, block=16)
    profile = dataclasses.replace(profile, model="tiny", length=LENGTH)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    study = Study(model, inputs / "texts.npz", tmp_path / "first", settings, stop=stop)
    profile.save(study.profile_path)
    compile_evaluation(study, settings.methods)
    stages.calibrate(study)
    stages.first(study)
    assert len(study.records) == 4 * 3
    study = Study(model, inputs / "texts.npz", tmp_path / "second", settings, earlier=tmp_path / "first")
    stages.first(study)
    assert len(study.records) == 4 * (3 * 2 + 2)
    about, lines = read(tmp_path / "second" / "records-tiny-256-16.jsonl")
    assert about["model"] == "tiny" and len(lines) == len({json.dumps(line) for line in lines})


@pytest.mark.slow
def test_every_stage(inputs: Path, model: Transformer, tmp_path: Path, capsys):
    study = Study(model, inputs / "texts.npz", tmp_path / "second", SETTINGS)
    compile_evaluation(study, SETTINGS.methods)
    for stage in stages.STAGES.values():
        stage(study)
    said = capsys.readouterr().out
    assert "all texts are read" in said
    about, lines = read(tmp_path / "second" / "records-tiny-256-16.jsonl")
    assert about["model"] == "tiny" and len(lines) == len({json.dumps(line) for line in lines})
    natural = [line for line in lines if "asked" not in line and line["layers"] == "profile" and line["budget"] < 1]
    assert {(x["method"], x["budget"]) for x in natural} >= {(m, b) for m in SETTINGS.methods for b in SETTINGS.budgets}
    for line in lines:  # MInference keeps whole lines of tokens, as many as fit
        least = 0.97 if line["method"] == "minference" else 0.999
        assert least < line["density"] / line["budget"] < 1.001, line
    assert max(line["kl"] for line in lines if line["budget"] == 1) < 1e-5
    summary = json.loads((tmp_path / "second" / "summary-tiny-256-16.json").read_text())
    assert {row["sequences"] for row in summary["methods"] if row["method"] == "hads"} == {8}
    assert {one["budget"] for one in summary["tasks"]} <= {0.4}
    assert set(summary["last_rows"]) == {"every", "none"}
    assert {row["method"] for row in summary["last_rows"]["every"]["methods"]} == {"hads"}
    seed = json.loads((tmp_path / "second" / "seed-tiny-256-16.json").read_text())["results"]
    assert [(row["method"], row["active_blocks"]) for row in seed] == [
        ("dense", 1.0),
        ("sliding_window", 0.4),
        ("hads", 0.6),
        ("sliding_window", 0.6),
    ]
    with np.load(tmp_path / "second" / "portrait-tiny-256-16.npz") as found:
        assert found["shares"].shape == (2, 4)


def test_files_of_another_model_carry_its_name():
    assert str(Settings()) == "8192-64" and str(Settings(name="other", length=32768)) == "other-32768-64"


def test_sequences_of_long_documents_come_first():
    found = {"long": np.arange(70_000, 70_009, dtype=np.uint32), "a": np.arange(3), "b": np.arange(3, 6)}
    tokens, names = texts.sequences(found, 3, 9)
    assert names.tolist() == ["long", "long", "long", "a", "b"] and tokens[0].tolist() == [70_000, 70_001, 70_002]
    tokens, names = texts.sequences(found, 4, 9, 1)
    assert names.tolist() == ["long", texts.SHORT] and tokens[1].tolist() == [0, 1, 2, 3]
    assert texts.narrow(tokens).dtype == np.uint32 and texts.narrow(tokens[1:]).dtype == np.uint16


@pytest.mark.slow
def test_long_texts_are_compared_one_after_the_other(inputs: Path, model: Transformer, tmp_path: Path):
    methods = ("sink_window", "hads", "x_attention_8_heads")
    settings = dataclasses.replace(SETTINGS, name="other", batch=1, sequences=1, methods=methods, budgets=(0.43,))
    profile = dataclasses.replace(case.random_profile(head_dim=16, block=16), model="other", length=LENGTH)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4

    study = Study(model, inputs / "texts.npz", tmp_path / "first", settings, stop=stop)
    profile.save(study.profile_path)
    stages.long(study)
    records = "records-other-256-16.jsonl"
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        *("profile-other-256-16.json", "x-heads-other-256-16.npz", records, "summary-other-256-16.json")
    }
    order = ["hads", "x_attention_8_heads", "sink_window"]  # on each text
    assert [line["method"] for line in read(tmp_path / "first" / records)[1]] == [*order, "hads"]

    # A run goes on from records that were compressed and put in its folder, with what else it needs beside its texts.
    out = tmp_path / "second"
    out.mkdir()
    with lzma.open(out / f"{records}.xz", "wt") as file:
        file.write((tmp_path / "first" / records).read_text())
    study = Study(model, inputs / "texts.npz", out, settings, earlier=tmp_path / "first")
    assert len(study.records) == 4
    stages.long(study)
    assert [line["method"] for line in read(out / records)[1]] == order * len(EVALUATION)


def test_every_rival_reads_long_texts_in_both_forms():
    assert {*RIVALS, *STRENGTHENED, "hads", "oracle_gain", "oracle_top_k"} == set(LONG_METHODS)
    assert LONG_METHODS[:3] == ("hads", "oracle_gain", "flash_prefill+forced")


def test_a_model_in_pieces_is_joined(tmp_path: Path):
    (tmp_path / "model.gguf.00").write_bytes(b"ab")
    (tmp_path / "model.gguf.01").write_bytes(b"c")
    assert join(tmp_path, tmp_path / "work").read_bytes() == b"abc"
    with pytest.raises(SystemExit, match=r"neither \*.gguf nor"):
        join(tmp_path / "work" / "none", tmp_path)


def test_a_stage_says_what_is_missing(inputs: Path, model: Transformer, tmp_path: Path):
    study = Study(model, inputs / "texts.npz", tmp_path, SETTINGS)
    with pytest.raises(SystemExit, match=r"profile-tiny-256-16\.json is missing: run the stage calibrate"):
        stages.full(study)
    case.random_profile(head_dim=16).save(study.profile_path)
    with pytest.raises(SystemExit, match=r"v1-tiny-256-16\.npz is missing: run the stage calibrate"):
        study.evaluate(study.read(EVALUATION, 1), ["hads_v1"], [0.6])
