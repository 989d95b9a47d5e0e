"""Summaries made anew from records, and the tables of settings that a run may or may not have."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from benchmarks.hads import summaries
from benchmarks.report import hads as report
from benchmarks.report import shared_texts

LINE = {"budget": 0.2, "layers": "profile", "density": 0.2, "loss": 2.0, "sparse_loss": 2.1, "same_token": 1.0}


def test_older_records_get_present_names_and_documents(tmp_path: Path):
    lines = [LINE | {"sequence": f"a/{n}", "digest": "ab"[n], "method": "tca+forced", "kl": 1.0} for n in (0, 1)]
    path = tmp_path / "records.jsonl.xz"
    for about, name in (({}, "hads_shares_top_k+forced"), ({"rivals": 2}, "tca+forced")):
        path.write_bytes(lzma.compress("\n".join(map(json.dumps, [{"about": about}, *lines])).encode()))
        assert summaries.read(path) == (about, [line | {"method": name} for line in lines])
    found = list(summaries.with_documents([*lines, {"asked": 1}], {"a": "a/one", "b": "a/one"}))
    assert [line.get("document") for line in found] == ["a/one", "a/one", None]
    with pytest.raises(ValueError, match=r"documents\.tsv does not know a/1 \(b\)"):
        list(summaries.with_documents(lines, {"a": "a/one"}))


def test_every_setting_of_the_last_rows_gets_its_tables():
    asked = {"asked": 4, "dense_right": 4}
    lines = [
        LINE | {"sequence": domain, "domain": domain, "method": method, "kl": 0.1, "last_rows": setting} | more
        for setting, right in (("own", 4), ("every", 3), ("none", 2))
        for method in ("hads", "sink_window")
        for domain, more in (
            ("prose", {}),
            ("copy-8192", asked | {"both_right": right}),
            ("copy_middle-8192", asked | {"both_right": 1}),
        )
    ]
    found = summaries.extras(lines)["last_rows"]
    assert {name: len(of["methods"]) for name, of in found.items()} == {"every": 2, "none": 2}
    said = report.last_rows({"last_rows": found}, "8192")
    assert said.count("With the weight of the last rows given to ") == 2 and "| **HADS** | 0.1000 (+10.52%) |" in said
    assert said.count("8192 tokens: 4 of copy, 4 of copy in the middle.") == 2
    assert said.count("| **HADS** | 75% | 25% |") == said.count("| **HADS** | 50% | 25% |") == 1
    assert said.count("| sink + window | 50% | 25% |") == 1 and report.last_rows({}, "8192") == ""


def test_methods_are_compared_on_the_texts_that_all_have_read(monkeypatch):
    def line(method: str, text: str, budget: float, kl: float) -> dict:
        return LINE | {"sequence": text, "document": text, "method": method, "budget": budget, "kl": kl}

    lines = [line("hads", text, budget, 0.1) for text in "abcd" for budget in (0.1, 0.2)]
    lines += [line("quest", text, 0.2, kl) for text, kl in zip("abc", (0.2, 0.3, 0.05), strict=True)]
    lines += [line("quest+forced", text, budget, 0.3) for text in "bcd" for budget in (0.1, 0.2)]
    monkeypatch.setattr(shared_texts, "recorded", lambda which: ({}, lines))
    found = shared_texts.shared("any")
    assert found.texts == 2 and found.budgets == [0.2]  # b and c
    assert {r["method"]: (r["sequences"], round(r["kl"], 3)) for r in found.rows} == {
        "hads": (2, 0.1),
        "quest": (2, 0.175),
        "quest+forced": (2, 0.3),
    }
    assert found.lower == (3, 4) and found.lower_everywhere == (8, 9)
    lines[:] = [one for one in lines if one["sequence"] in "bc"]
    assert shared_texts.shared("any") is None
