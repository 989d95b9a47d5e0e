"""The commands of "Race on your shapes", "Keep it fast" and "Write a kernel" run as shown, on small shapes."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys

import pages
import pytest
from test_plugins import WHOLE
from typer.testing import CliRunner

import xsake
from xsake._cli import app
from xsake._op import registry
from xsake._race import paired, sustained
from xsake.autotune.measure import contest, isolation
from xsake.autotune.measure.interference import Contention
from xsake.autotune.search import last_race

# What each command gets besides, so that it takes a second or two.
BRIEFLY = {
    "race": ["--rounds", "2"],
    "gate": ["--rounds", "3", "--round-seconds", "0.001"],
    "check": ["--only", "vmap"],
    "autotune": ["--from-call", "1x96x2x16,block=16,causal,density=0.5", "--no-isolate"],
    "new-kernel": [],
    "tuning": [],
}
ENDS = {"xsake gate": (0, 1, 3)}  # in so little time a call may seem slower


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    """In a folder of their own, in this process, on a machine that others use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(tmp_path / "tuned"))
    monkeypatch.setattr(isolation, "Worker", isolation.Here)
    monkeypatch.setattr(paired, "disturbance", lambda *race: None)
    monkeypatch.setattr(last_race, "disturbance", lambda *race: None)
    monkeypatch.setattr(contest, "contention", lambda: contextlib.nullcontext(Contention()))
    for name in ("PAUSE", "BURST", "SUSTAINED"):
        monkeypatch.setattr(sustained, name, 1e-4)


def small(shape: str) -> str:
    """The same parts of a shape with little in them."""
    _, *rest = shape.split(",")
    return ",".join(["1x96x4x16,block=16", *(re.sub(r"kv=.*", "kv=2", part) for part in rest)])


def run(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True)[1:]]
    words = [small(word) if before == "--shape" else word for before, word in zip(["", *words], words, strict=False)]
    said = CliRunner().invoke(app, [*words, *BRIEFLY[words[0]]], env={"COLUMNS": "150"})
    assert said.exit_code in ENDS.get(line, (0,)), f"{line}: {said.output}"


def commands(name: str) -> list[str]:
    lines = pages.commands_of(pages.ROOT / "docs" / f"{name}.md")
    return [line for line in lines if line.startswith("xsake ")]


@pytest.mark.parametrize("name", [pytest.param("race", marks=pytest.mark.slow), "keep_it_fast"])
def test_the_commands_of_a_page_run(name, tmp_path):
    (tmp_path / "kernel_of_a_page.py").write_text(WHOLE)
    xsake.register_backend("my_kernel", tmp_path / "kernel_of_a_page.py")
    found = commands(name)
    assert len(found) == 2
    for line in found:
        run(line)
    written = {"race": ["race.json", "race.png"], "keep_it_fast": [".benchmarks"]}[name]
    assert all((tmp_path / path).exists() for path in written)


@pytest.mark.slow
def test_a_kernel_is_written_by_the_commands_of_its_page(tmp_path, monkeypatch):
    first, *others = commands("write_a_kernel")
    assert first == "xsake new-kernel my_kernel"
    run(first)
    monkeypatch.chdir(tmp_path / "my_kernel")
    xsake.register_backend("my_kernel", "my_kernel/backend.py")
    assert len(others) > 5
    for line in others:
        run(line)
