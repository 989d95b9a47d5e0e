"""No number in the README and in docs/ is typed by hand."""

from __future__ import annotations

import hashlib
import re

import pytest

from benchmarks import record, report
from benchmarks.report import aims, generation, selection, words
from xsake._ground import words as WORDS
from xsake._op import tuned

PAGES = report.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_recorded_runs_say(page):
    assert report.rendered(page) == page.read_text(), "run: python -m benchmarks.report"


def test_every_part_is_on_a_page():
    assert {name for page in PAGES for name in report.parts_of(page)} == set(report.PARTS)


def test_an_unknown_part_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: nothing -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"page\.md asks for the part 'nothing'"):
        report.rendered(page)


def test_an_edited_kernel_changes_no_page(monkeypatch):
    """Tables must not depend on the kernels' sources: every edit of a kernel would need the pages made again."""
    monkeypatch.setattr(tuned, "kernel_hash", lambda name: hashlib.sha256(name.encode()).hexdigest()[:16])
    page = record.ROOT / "docs" / "tuning.md"
    assert report.rendered(page) == page.read_text()


def test_the_kernels_of_chunks_are_beside_those_of_one_piece():
    def traced(seconds: float, launches: int) -> dict:
        kernels = {"gemm": {"seconds": seconds, "launches": launches}}
        return {"busy": seconds, "span": 2 * seconds, "launches": launches, "kernels": kernels}

    kernels = {"HADS 20%": traced(0.1, 28), "HADS 20%, chunks of 4096": traced(0.125, 224), "dense": None}
    assert "| `gemm` | 100.0 ms (28) | 125.0 ms (224) |" in generation.kernel_table(kernels)
    assert generation.kernel_table({}) is None


def test_a_grid_says_a_rows_first_words_once():
    rows = {(n, m): (f"n {n}", f"m {m}") for n in (1, 2) for m in (1, 2)}
    text = words.grid(("n", "m"), rows, {3: "times 3"}, lambda row, column: str(row[0] * row[1] * column))
    assert text.splitlines()[2:] == ["| n 1 | m 1 | 3 |", "|  | m 2 | 6 |", "| n 2 | m 1 | 6 |", "|  | m 2 | 12 |"]


@pytest.mark.parametrize("name", ["speed.md", "hads_results.md"])
def test_a_page_of_results_has_few_tables_and_names_that_people_know(name):
    text = (record.ROOT / "docs" / name).read_text()
    assert sum(line.startswith("| --- |") for line in text.splitlines()) <= 10
    cells = "".join(line for line in text.splitlines() if line.startswith("|"))
    names = [*WORDS.CALLS, *(name for name in WORDS.METHODS if "_" in name)]
    assert [name for name in names if name in cells] == [] and "+forced" not in cells
    assert re.findall(r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b", text) == [], (
        "commits are named in benchmarks/notes"
    )


def test_a_value_that_rounds_to_its_aim_is_not_missed():
    assert [aims.said(x, 1.05, more_is_better=True) for x in (1.046, 1.044)] == ["reached", "missed"]


def test_the_aims_with_masks_of_hads():
    raced = {
        ("smollm8k", "forward+backward", mask): x for mask, x in (("HADS 20%", 300.0), ("random, as HADS 20%", 320.0))
    }
    by = {(*call, who): x for call, x in raced.items() for who in ("xsake", "fa4")}
    found = {what.partition("backward, ")[2]: (aim, ratio) for what, aim, ratio, _ in aims.kernels(by)}
    assert found == {
        "HADS 20%: over FlashAttention-4": (1.05, 1.0),
        "HADS 20%: throughput over that of a random mask": (0.90, 300 / 320),
    }


def test_a_record_without_peers_has_no_table_of_them():
    assert selection.beside_peers([{"tokens": 8, "seconds": {}}]) == []


def test_a_cause_of_failure_is_told_once():
    peers = {"ejkernel, forward": {"raced": False, "words": "no `x`", "differences": None, "variant": None}}
    rows = [{"tokens": n, "group": 16, "choice": "scored", "seconds": {}, "peers": peers} for n in (8, 16)]
    assert selection.beside_peers(rows) == ["Not timed, since no 'x': ejkernel, forward."]
