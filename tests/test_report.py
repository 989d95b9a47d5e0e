"""No number in the README and in docs/ is typed by hand."""

from __future__ import annotations

import hashlib

import pytest

from benchmarks import record, report
from benchmarks.report import prompt
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
    text = "\n".join(prompt.kernels_of_chunks({"kernels": kernels}))
    assert "in chunks of 4096" in text and "| `gemm` | 100.0 (28) | 125.0 (224) |" in text
    assert list(prompt.kernels_of_chunks({})) == []
