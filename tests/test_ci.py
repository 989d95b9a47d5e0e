""".ci/run with commands that do nothing: what it runs, in which order, and what it says of what it left out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("bash", "cat", "dirname", "mktemp", "timeout", "tail")


@pytest.fixture
def run_ci(tmp_path):
    """Runs a copy of .ci/run in which the commands `failing` fail: (exit status, calls of make, what was printed)."""

    def run(*failing: str) -> tuple[int, list[str], str]:
        (tmp_path / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
        for tool in TOOLS:
            (tmp_path / tool).symlink_to(shutil.which(tool))
        log = tmp_path / "log"
        for command in ("make", "npm", "apt-get"):
            fails = [name.partition(" ")[2] for name in failing if name.split()[0] == command]
            tests = "".join(f'[[ "$*" == *"{arguments}"* ]] && exit 1\n' for arguments in fails)
            (tmp_path / command).write_text(f'#!/usr/bin/env bash\necho "{command} $*" >>{log}\n{tests}exit 0\n')
            (tmp_path / command).chmod(0o755)
        done = subprocess.run(
            [str(tmp_path / ".ci" / "run")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
        )
        made = [line for line in log.read_text().splitlines() if line.startswith("make ")]
        return done.returncode, made, done.stdout + done.stderr

    return run


def test_all_of_it_runs_and_the_browser_comes_before_the_suite(run_ci):
    code, made, said = run_ci()
    assert code == 0 and "Nothing was left out" in said.splitlines()[-1]
    assert made.index("make browser") < made.index("make --jobs=2 lint docs test INTERPRETED=1")
    assert "make check-web" in made


@pytest.mark.parametrize(
    ("failing", "left_out"),
    [(["apt-get "], ["in a browser"]), (["npm "], ["no Node"]), (["npm ", "apt-get "], ["in a browser", "no Node"])],
)
def test_the_last_lines_say_what_was_left_out(run_ci, failing, left_out):
    code, made, said = run_ci(*failing)
    assert code == 0 and any("lint docs test" in line for line in made)
    assert "LEFT OUT" in said
    for line, expected in zip(said.splitlines()[-len(left_out) :], left_out, strict=True):
        assert line.startswith("- ") and expected in line


@pytest.mark.parametrize("step", ["check-web", "browser", "lint docs test"])
def test_a_step_that_fails_fails_the_run(run_ci, step):
    code, _, said = run_ci(f"make {step}")
    assert code != 0 and "Nothing was left out" not in said
