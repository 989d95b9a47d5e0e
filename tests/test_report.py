"""No number in the README is typed by hand."""

from benchmarks import report


def test_readme_says_what_the_recorded_runs_say() -> None:
    text = report.README.read_text()
    assert report.rendered(text) == text, "run: python -m benchmarks.report"
