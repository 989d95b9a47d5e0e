"""The study's short form, which the demo shows."""

from __future__ import annotations

from pathlib import Path

import hads_case as case
import numpy as np
import pytest
from rich.console import Console

from xsake._cli.demo import model as short
from xsake._cli.demo import prompt
from xsake.hads.profile import profile as profile_module
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.texts import Text
from xsake.model import PRESETS
from xsake.model.weights.published import PUBLISHED


def test_the_shipped_profile_is_smollm2s():
    profile, config = HadsProfile.shipped(short.MODEL), PRESETS["smollm2-135m"]
    assert (profile.layers, profile.q_heads, profile.kv_heads, profile.head_dim, profile.model) == (
        config.layers,
        config.q_heads,
        config.kv_heads,
        config.head_dim,
        short.MODEL,
    )
    for budget in short.BUDGETS:  # they leave a choice at the demo's length
        counts = layer_counts(profile, budget, short.LENGTH)
        assert len(set(counts.tolist())) > 1


def test_shipped_profiles_are_what_their_names_say():
    for path in (Path(profile_module.__file__).parent / "shipped").glob("*.json"):
        name, tokens = path.stem.rsplit("-", 1)
        profile = HadsProfile.shipped(name, int(tokens))
        assert name in PUBLISHED and (profile.model, profile.length) == (name, int(tokens))


def test_the_page_is_whole():
    assert len(prompt.page(lambda text: list(text.encode()), short.LENGTH)) == short.LENGTH


@pytest.mark.slow
def test_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(short, "BUDGETS", (0.6,))
    model = case.tiny_model()
    text = Text("numbers/0", "numbers", np.random.default_rng(0).integers(0, 512, 200).astype(np.int32))
    console = Console(width=200, record=True)
    (tmp_path / "records.jsonl").write_text("of an earlier demo")
    short.compare(model, text, case.random_profile(head_dim=16), tmp_path, console)
    said = console.export_text()
    for name in ("hads", "sink_window", "mean_top_k", "x_attention_8"):
        assert name in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "heads.png",
        "mask.png",
        "quality.png",
        "records.jsonl",
        "summary.json",
    }


@pytest.mark.slow
def test_the_race_to_the_first_token():
    """Both ways are timed, each with what it compiles left out."""
    model = case.tiny_model()
    profile = case.random_profile(head_dim=16)
    tokens = np.random.default_rng(0).integers(0, 512, 200).tolist()
    console = Console(width=200, record=True)
    times = prompt.race(model, tokens, profile, 0.6, console)
    assert list(times) == ["dense", "HADS, 60% of the blocks"] and min(times.values()) > 0
    assert "A prompt of 200 tokens" in console.export_text()
    assert model.config.layers == len(model.blocks) == 2
