"""The pictures of a study: few lines, names in words, and numbers on every axis."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from xsake.hads.study import pictures
from xsake.hads.study.summary import Summary


def summary(method: str, budget: float, kl: float, gap: float) -> Summary:
    return Summary(method, budget, "profile", 1, 1, budget, 0.0, kl, gap, 1.0, None, None)


def test_few_methods_are_shown_each_in_one_form():
    kl = {"x_attention_8": 2, "x_attention_8+forced": 1, "quest": 3, "cobs": 4, "prism": 5, "sink_window": 6, "duo": 7}
    own = ["hads", "hads_group", "oracle_gain", "oracle_top_k"]
    rows = [summary(name, 0.1, value, value) for name, value in (kl | dict.fromkeys(own, 1)).items()]
    first = ["hads", "oracle_gain"]
    assert pictures.shown(rows) == [*first, "x_attention_8+forced", "quest", "cobs", "prism"]
    assert pictures.shown(rows, {"duo", "hads"}) == [*first, "duo", "x_attention_8+forced", "quest", "cobs"]


@pytest.mark.parametrize("gaps", [(0.02, 0.03), (0.02, 0.4), (0.001, 2.0), (-0.01, 0.03), (0.0, 0.0)])
def test_every_axis_has_numbers(gaps, tmp_path, monkeypatch):
    """Also for an evaluation at a single budget."""
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figure.savefig(path))
    rows = [summary(name, 0.2, 0.1 + gap, gap) for name, gap in zip(("hads", "quest"), gaps, strict=True)]
    pictures.quality_over_density(rows, [], tmp_path / "quality.png")
    for axis in plt.gcf().axes:
        low, high = sorted(axis.get_ylim())
        seen = [label for label in axis.get_yticklabels() if low <= label.get_position()[1] <= high]
        assert len([label for label in seen if label.get_text()]) >= 2
    plt.close()
