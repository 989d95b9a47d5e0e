"""`xsake showcase`: every document of the server as a file, and nothing that needs a server."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from dashboard_server import serving, write_run
from typer.testing import CliRunner

from xsake._cli import app
from xsake.dashboard.serve.command import gather
from xsake.dashboard.show import showcase

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def read(path: Path) -> tuple[str, object]:
    """The name and the document of a data file, as a browser would assign them."""
    text = path.read_text()
    head, _, body = text.partition("] = ")
    return json.loads(head.removeprefix("(window.XSAKE_DATA ??= {})[")), json.loads(body.removesuffix(";\n"))


@pytest.fixture
def pages(tmp_path):
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(f"<html><head>{showcase.MARK}</head></html>")
    (folder / "assets" / "app.js").write_text("1")
    return folder


@pytest.mark.slow  # the server has tests of its own
def test_one_command_writes_the_documents_of_the_server(tmp_path):
    write_run(tmp_path / "runs" / "</script>", 5, config={"steps": 5})  # finished: its status does not change
    result = CliRunner().invoke(app, ["showcase", str(tmp_path / "runs"), "--out", str(tmp_path / "site")])
    assert result.exit_code == 0 and "index.html" in result.output, result.output
    total = sum(path.stat().st_size for path in (tmp_path / "site").rglob("*") if path.is_file())
    assert total < showcase.MOST_BYTES
    assert '<script defer src="api/site.js"></script>' in (tmp_path / "site" / "index.html").read_text()
    found = {}
    for path in (tmp_path / "site" / "api").rglob("*.js"):
        name, document = read(path)
        assert str(path.relative_to(tmp_path / "site")) == f"{name}.js"
        found[name] = document
    assert found["api/site"]["static"] and not found["api/site"]["features"]["live"]
    with serving(gather([tmp_path / "runs"], records=RESULTS, own_tuning=False)) as client:
        client.get("/api/runs")
        for name in found:
            if name != "api/site":
                assert client.get(f"/{name}").json() == found[name], name
    ids = [run["id"] for run in found["api/runs"]["runs"]]
    assert all(f"api/runs/{one}/series" in found for one in ids) and len(ids) >= 6


def test_a_showcase_replaces_only_a_showcase(tmp_path, pages):
    shown = gather([write_run(tmp_path / "runs" / "a", 2).parent], own_tuning=False)
    out = tmp_path / "deep" / "site"
    showcase.build(shown, out, pages=pages)
    (out / "api" / "left.js").write_text("of an older run")
    showcase.build(shown, out, pages=pages)
    assert not (out / "api" / "left.js").exists() and [path.name for path in out.parent.iterdir()] == ["site"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else than a showcase; nothing was changed"):
        showcase.build(shown, tmp_path / "mine", pages=pages)
    with pytest.raises(ValueError, match="the pages are not built"):
        showcase.build(shown, out, pages=tmp_path / "runs")
    assert (out / "index.html").is_file()


def test_a_full_disk_is_told_once(tmp_path, pages):
    """Played by a limit on the size of files."""
    for name in ("a.js", "b.js"):
        (pages / "assets" / name).write_text("x" * 200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as told:
            showcase.build(gather([], own_tuning=False), tmp_path / "site", pages=pages)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (told.value.strerror, told.value.filename) == ("File too large", str(tmp_path / "site"))
    assert not (tmp_path / "site").exists() and not list(tmp_path.glob(".site-*"))
