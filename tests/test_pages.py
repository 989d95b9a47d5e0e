"""The pages do what they say: their code runs, their commands and links exist, the README is short."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
from pathlib import Path

import click
import jax
import pages
import pytest
import typer

import xsake
from xsake._cli import app

PAGES = pages.every_page()
WITH_CODE = [page for page in PAGES if any(block.language in pages.RUN for block in pages.blocks_of(page))]
MAKEFILE = (pages.ROOT / "Makefile").read_text()


def test_readme_is_short():
    assert len((pages.ROOT / "README.md").read_text()) <= 8000


def test_ci_runs_the_commands_of_the_readme():
    assert {"make demo", "make test"} <= set(pages.commands_of(pages.ROOT / "README.md"))
    assert "make test" in (pages.ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_every_block_is_run_or_says_that_it_is_not(page):
    for block in pages.blocks_of(page):
        directive = block.language.startswith("{")
        assert directive or block.language in (*pages.RUN, *pages.READ), (
            f"{pages.name_of(page)}, line {block.line}: language {block.language!r}; use python or pycon for code that "
            f"runs, console for commands, text for what cannot run here"
        )


@pytest.mark.parametrize("page", WITH_CODE, ids=pages.name_of)
def test_code_runs(page, tmp_path, monkeypatch):
    """As a reader would run it: the blocks of a page one after the other, in an empty folder, with JAX's defaults."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with jax.numpy_dtype_promotion("standard"):
        for block in pages.blocks_of(page):
            if block.language == "python":
                code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own line
                exec(compile(code, str(page), "exec"), names)
            elif block.language == "pycon":
                runner, report = doctest.DocTestRunner(optionflags=flags), []
                test = doctest.DocTestParser().get_doctest(block.text, names, pages.name_of(page), None, block.line)
                runner.run(test, out=report.append, clear_globs=False)
                names |= test.globs
                assert not report, "".join(report)


def _missing_option(words: list[str]) -> str | None:
    """What of an `xsake` command does not exist."""
    command: click.Command = typer.main.get_command(app)
    for word in words:
        if isinstance(command, click.Group) and not word.startswith("-"):
            if word not in command.commands:
                return word
            command = command.commands[word]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return next((word for word in words if word.startswith("--") and word.split("=")[0] not in known), None)


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_commands_exist(page):
    for line in pages.commands_of(page):
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE) for target in targets), line
        elif words[0] == "xsake":
            assert (problem := _missing_option(words[1:])) is None, f"{line}: there is no {problem}"
        elif words[:2] == ["python", "-m"] and words[2].split(".")[0] in ("benchmarks", "xsake"):
            assert importlib.util.find_spec(words[2]) is not None, line


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.split("#")[0]
        if path and not re.match(r"[a-z]+:", path):
            assert (page.parent / path).exists(), f"{pages.name_of(page)} links to {target}"


def test_every_benchmark_is_listed():
    """benchmarks/README.md says of every script what it measures."""
    folder = pages.ROOT / "benchmarks"
    text = (folder / "README.md").read_text()
    scripts = [p.relative_to(folder) for p in sorted(folder.rglob("*.py")) if "results" not in p.parts]
    assert [str(path) for path in scripts if f"`{path}`" not in text and f"`{path.parent}/`" not in text] == []




def _documented() -> str:
    return "".join(page.read_text() for page in (pages.ROOT / "docs" / "api").glob("*.md"))


@pytest.mark.parametrize("module", ["xsake", "xsake.hads", "xsake.model", "xsake.tuning_db", "xsake.patterns"])
def test_every_public_name_is_in_the_reference(module):
    text = _documented()
    if module == "xsake.patterns":
        made = vars(xsake.patterns).items()
        names = [n for n, f in made if getattr(f, "__module__", "") == xsake.patterns.__name__ and n[0] != "_"]
    else:
        names = importlib.import_module(module).__all__
    assert [f"{module}.{name}" for name in names if not re.search(rf":: {module}\.{name}\b", text)] == []
