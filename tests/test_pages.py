"""The pages do what they say: their code runs, their commands and links exist, the README is short."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pages
import pytest
import typer

import xsake
from xsake._cli import app
from xsake._op import registry

PAGES = pages.every_page()
WITH_CODE = [page for page in PAGES if any(block.language in pages.RUN for block in pages.blocks_of(page))]
MAKEFILE = (pages.ROOT / "Makefile").read_text()


def test_readme_is_short():
    assert len((pages.ROOT / "README.md").read_text()) <= 8000


def test_readme_lists_the_arguments_of_the_call():
    text = (pages.ROOT / "README.md").read_text()
    given = re.search(r"^xsake\.attention\((.*?)\)$", text, re.MULTILINE | re.DOTALL)[1]
    names = [name.split("=")[0].strip() for name in given.split(",") if name.strip() != "*"]
    assert names == list(inspect.signature(inspect.unwrap(xsake.attention)).parameters)


def test_readme_lists_every_backend():
    text = (pages.ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `\"(\w+)\"` \|", text, re.MULTILINE)) == set(registry._BACKENDS)


def test_ci_runs_the_commands_of_the_readme():
    assert {"make demo", "make test"} <= set(pages.commands_of(pages.ROOT / "README.md"))
    assert re.search(r"^make .*\btest\b", (pages.ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_every_block_is_run_or_says_that_it_is_not(page):
    for block in pages.blocks_of(page):
        directive = block.language.startswith("{")
        assert directive or block.language in (*pages.RUN, *pages.READ), (
            f"{pages.name_of(page)}, line {block.line}: language {block.language!r}; use python or pycon for code that "
            f"runs, console for commands, text for what cannot run here"
        )


# These pages calibrate as test_hads_calibration does: one after the other, the second finds the first one's programs.
GROUPS = dict.fromkeys(("docs/hads.md", "docs/hads_any_model.md"), pytest.mark.xdist_group("calibration"))


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=pages.name_of(p), marks=GROUPS.get(pages.name_of(p), ())) for p in WITH_CODE]
)
def test_code_runs(page, tmp_path, monkeypatch):
    """As a reader would run it: the blocks of a page one after the other, in an empty folder, with JAX's defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    names: dict = {"__name__": "page"}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in pages.blocks_of(page):
            if pages.quote_of(block):
                continue
            if file := pages.file_of(block):
                Path(file).parent.mkdir(exist_ok=True)
                Path(file).write_text(block.text)
            elif block.language == "python":
                code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own line
                exec(compile(code, str(page), "exec", dont_inherit=True), names)
            elif block.language == "pycon":
                runner, report = doctest.DocTestRunner(optionflags=flags), []
                test = doctest.DocTestParser().get_doctest(block.text, names, pages.name_of(page), None, block.line)
                runner.run(test, out=report.append, clear_globs=False)
                names |= test.globs
                assert not report, "".join(report)


QUOTING = [page for page in PAGES if any(pages.quote_of(block) for block in pages.blocks_of(page))]


@pytest.mark.parametrize("page", QUOTING, ids=pages.name_of)
def test_quotes_are_in_the_files(page):
    for block in pages.blocks_of(page):
        if path := pages.quote_of(block):
            quote = block.text.partition("\n")[2]
            assert (pages.ROOT / path).read_text().count(quote) == 1, f"{pages.name_of(page)}, line {block.line}"


EDITING = [page for page in PAGES if any(block.language == "diff" for block in pages.blocks_of(page))]


@pytest.mark.parametrize("page", EDITING, ids=pages.name_of)
def test_edits_fit_the_files(page):
    for path, text in pages.edited(page).items():
        if path.endswith(".py"):
            compile(text, path, "exec")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_contributing_can_be_followed(tmp_path):
    """All four examples at once, in a copy of the checkout: the tests that the examples name pass."""
    page = pages.ROOT / "CONTRIBUTING.md"
    ignored = shutil.ignore_patterns(".*", "results", "__pycache__", "build", "dist", "out", "vendor")
    copy = shutil.copytree(pages.ROOT, tmp_path / "xsake", symlinks=True, ignore=ignored)
    files = {pages.file_of(block): block.text for block in pages.blocks_of(page) if pages.file_of(block)}
    files["kernels_simple/__init__.py"] = (copy / "examples/simple_kernel/simple_kernel/backend.py").read_text()
    for path, text in (files | pages.edited(page)).items():
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text(text)
    (copy / "src/xsake/kernels_simple").symlink_to("../../kernels_simple")
    suites = [
        "attention",
        "key_stride",
        "pattern_powers",
        "configs",
        "config_fields",
        "registry",
        "packaging",
        "import_direction",
    ]
    which = (
        "simple and (masks or everything_at_once) or stride or powers or config or registry or declared or direction"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", which, *(f"tests/test_{name}.py" for name in suites)]
    env = os.environ | {"PYTHONPATH": "src"}
    run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:]


def _missing_option(words: list[str]) -> str | None:
    """The first subcommand or option of an `xsake` command that does not exist, or None."""
    command: Any = typer.main.get_command(app)
    for word in words:
        if hasattr(command, "commands") and not word.startswith("-"):
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
    lines = (folder / "README.md").read_text().splitlines()
    named = "".join(
        line.split("|")[1] if line.startswith("|") else line for line in lines
    )  # of tables, the first column
    scripts = [p.relative_to(folder) for p in sorted(folder.rglob("*.py"))]
    assert [str(path) for path in scripts if f"`{path}`" not in named and f"`{path.parent}/`" not in named] == []
    gone = [name for name in re.findall(r"`([\w/]+\.py)`", named) if not (folder / name).exists()]
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_modules_that_are_named_exist(page):
    """Also in the text and in tables: `python -m benchmarks.report`."""
    for name in set(re.findall(r"python -m (benchmarks[\w.]*\w)", page.read_text())):
        assert importlib.util.find_spec(name) is not None, name


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
    assert [f"{module}.{name}" for name in names if not re.search(rf":: (xsake|{module})\.{name}\b", text)] == []
