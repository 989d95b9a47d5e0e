"""The examples of the docstrings run. The examples of the pages are in test_pages.py."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
from pathlib import Path

import pytest
from sweep import sweep

import xsake


def _modules() -> list[str]:
    """The modules with an example in a docstring."""
    found = (module.name for module in pkgutil.walk_packages(xsake.__path__, "xsake."))
    return [name for name in found if ">>>" in Path(importlib.util.find_spec(name).origin).read_text()]


MODULES = _modules()


def _tests(name: str) -> list[doctest.DocTest]:
    """The examples of a module. The checker of annotations wraps functions and so hides them from doctest's finder."""
    module = importlib.import_module(name)
    parser, found = doctest.DocTestParser(), []

    def visit(path: str, thing: object) -> None:
        text = getattr(thing, "__doc__", None)
        if text and ">>>" in text:
            found.append(parser.get_doctest(text, dict(vars(module)), path, name, None))

    for key, thing in vars(module).items():
        if getattr(thing, "__module__", None) != name:
            continue
        visit(key, thing)
        if isinstance(thing, type):
            for inner, member in vars(thing).items():
                member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                if isinstance(member, types.FunctionType):
                    visit(f"{key}.{inner}", member)
    return found


MODEL = [name for name in MODULES if name.startswith("xsake.model.")]  # whose pages are in test_pages.py


@pytest.mark.parametrize("name", sweep(MODULES, slow=MODEL))
def test_docstrings(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in _tests(name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_public_face_has_examples():
    documented = {test.name for name in MODULES for test in _tests(name)}
    assert {
        "attention",
        "implementations",
        "BlockMask.from_blocks",
        "BlockMask.from_indices",
        "dense",
        "from_function",
    } <= documented


def _listed() -> dict[str, list[str]]:
    """The classes of the reference, and the members that it shows of each."""
    pages = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
    classes = re.compile(r"^\.\. autoclass:: ([\w.]+).*\n(?: +:members: *(.*)\n)?", re.MULTILINE)
    found = [match for page in pages for match in classes.findall(page.read_text())]
    return {name: [member for member in members.split(", ") if member] for name, members in found}


LISTED = _listed()


@pytest.mark.parametrize("name", sorted(name for name in LISTED if LISTED[name]))
def test_the_reference_names_the_public_members_of_a_class(name):
    """One by one, so that builders which only this package calls stay out."""
    owner = pkgutil.resolve_name(name)
    missing = [member for member in LISTED[name] if not getattr(owner, member).__doc__]
    assert not missing, f"{name} has no docstring on {missing}"
    assert not {"of_active", "of_lists", "of_finished", "poisoned", "read", "by_block"} & set(LISTED[name])


@pytest.mark.parametrize("name", [name for name in xsake.__all__ if name.endswith("attention")])
def test_signatures_say_shapes_and_types(name):
    """Only the configuration is an implementation's own."""
    parameters = inspect.signature(getattr(xsake, name)).parameters.values()
    assert [p.name for p in parameters if p.annotation in ("Any", inspect.Parameter.empty)] == ["config"]


@pytest.mark.parametrize("name", xsake.__all__)
def test_public_names_have_docstrings(name):
    assert len(getattr(xsake, name).__doc__ or "") > 40
