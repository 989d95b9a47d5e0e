"""The commands of "Race on your shapes", "Keep it fast" and "Write a kernel" run as shown, on small shapes."""

from __future__ import annotations

import shlex

import pages
import pytest
import tuning_fakes
import workbench
from test_plugins import WHOLE

import xsake
from xsake._measure.isolation import InProcess
from xsake.autotune import command

ENDS = {"xsake gate": (0, 1, 3)}  # in so little time a call may seem slower
WRITTEN = {"race": ["race.json", "race.png"], "keep_it_fast": [".benchmarks"]}


@pytest.fixture(autouse=True)
def _briefly(tmp_path, monkeypatch):
    workbench.set_up(monkeypatch, tmp_path)


def run(line: str) -> None:
    workbench.run(shlex.split(line, comments=True)[1:], ENDS.get(line, (0,)))


def commands(name: str) -> list[str]:
    lines = pages.commands_of(pages.ROOT / "docs" / f"{name}.md")
    return [line for line in lines if line.startswith("xsake ")]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_commands_of_a_page_run(name, tmp_path):
    path = tmp_path / f"kernel_of_{name}.py"
    path.write_text(WHOLE)
    xsake.register_backend("my_kernel", path)
    found = commands(name)
    assert len(found) > 1
    for line in found:
        run(line)
    assert all((tmp_path / path).exists() for path in WRITTEN[name])


def test_a_kernel_is_written_by_the_commands_of_its_page(tmp_path, monkeypatch):
    first, *others = commands("write_a_kernel")
    assert first == "xsake new-kernel my_kernel"
    run(first)
    monkeypatch.chdir(tmp_path / "my_kernel")
    xsake.register_backend("my_kernel", "my_kernel/backend.py")
    assert len(others) > 5
    for line in others:
        if line == "xsake autotune --budget 5m":  # for XSAKE's own kernels: as other tests do, without a device
            monkeypatch.setattr(command, "InProcess", lambda service: InProcess(tuning_fakes.Service))
        run(line)
