"""The outcomes of tests as a record that grows over several runs, by a plugin of pytest.

PYTEST_DONT_REWRITE: the module is imported before pytest loads it as a plugin, which would be warned of.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest  # and nothing that imports jax: tests/conftest.py must set its flags first

ROOT = Path(__file__).resolve().parents[2]
SAME = ("commit", "device", "python", "versions")  # outcomes of runs that agree in these make one record
NOT_RUN = "not run"


class Outcomes:
    """The outcome of each test: "passed", "failed", "skipped" or "not run", with seconds and the reason."""

    def __init__(self, environment: dict[str, Any], tests: dict[str, dict[str, Any]], path: Path):
        self.environment, self.tests, self.path = environment, tests, path

    @classmethod
    def resume(cls, environment: dict[str, Any], path: Path) -> Outcomes:
        """With the outcomes of an earlier run in `path`, if it was of the same commit, device and versions."""
        if not path.exists():
            return cls(environment, {}, path)
        earlier = json.loads(path.read_text())
        other = [name for name in SAME if earlier["environment"].get(name) != environment[name]]
        commit = environment["commit"]
        if other or commit == "unknown" or commit.endswith("-dirty"):
            why = f"of another {' and '.join(other)}" if other else f"of commit {commit!r}, which names no one state"
            print(f"the record in {path} is {why}: every test runs, and the record is replaced", flush=True)
            return cls(environment, {}, path)
        return cls(environment, earlier["results"]["tests"], path)

    @property
    def passed(self) -> list[str]:
        return [name for name, test in self.tests.items() if test["outcome"] == "passed"]

    def expect(self, names: Sequence[str]) -> None:
        for name in names:
            self.tests.setdefault(name, {"outcome": NOT_RUN})
        self.save()

    def add(self, report: pytest.TestReport) -> None:
        """Set-up, call and tear-down report one after another: what is worst counts."""
        test = self.tests.setdefault(report.nodeid, {"outcome": NOT_RUN})
        if report.when == "setup":
            test.clear()
            test["outcome"] = NOT_RUN
        if report.outcome == "passed" and report.when != "call":
            return
        if test["outcome"] != "failed":
            test |= {"outcome": report.outcome, "seconds": round(report.duration, 2)}
            if report.outcome != "passed":
                test["reason"] = _reason(report)
        self.save()

    def results(self) -> dict[str, Any]:
        files: dict[str, Counter[str]] = {}
        for name, test in sorted(self.tests.items()):
            files.setdefault(name.split("::")[0], Counter())[test["outcome"]] += 1
        total = sum(files.values(), Counter())
        failed = [name for name, test in sorted(self.tests.items()) if test["outcome"] == "failed"]
        return {"total": total, "files": files, "failed": failed, "tests": dict(sorted(self.tests.items()))}

    def save(self) -> None:
        from xsake._ground import atomic  # after tests/conftest.py, which hooks into the import of xsake

        text = json.dumps({"environment": self.environment, "results": self.results()}, indent=1)
        atomic.write_text(self.path, text + "\n")


def _reason(report: pytest.TestReport) -> str:
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):  # (file, line, reason of the skip)
        said = str(longrepr[2])
    else:
        crash = getattr(longrepr, "reprcrash", None)
        said = crash.message if crash else str(longrepr)
    return said.replace(f"{ROOT}/", "")[:600]


# -- the plugin of pytest: `run` names this module with -p, which reaches the processes of pytest-xdist too -----------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--leave-out", type=Path, help="a JSON file of the names of tests that do not run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("--leave-out")
    names = set(json.loads(given.read_text())) if given else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


class Watch:
    """The part of the plugin that only the main process has."""

    def __init__(self, outcomes: Outcomes):
        self.outcomes = outcomes

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.outcomes.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.outcomes.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report)


def run(environment: dict[str, Any], path: Path, marker: str, of_pytest: Sequence[str]) -> int:
    """The exit code: 1 if a test of the record in `path` has failed, in this run or before."""
    if marker == "gpu" and environment["platform"] != "gpu":
        raise SystemExit(f"no GPU here, but {environment['device']}: give -m MARKER for tests that need none")
    outcomes = Outcomes.resume(environment, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        leave_out = Path(temporary) / "passed.json"
        leave_out.write_text(json.dumps(outcomes.passed))
        options = ["-p", "benchmarks.harness.outcomes", "--leave-out", str(leave_out), "--benchmark-disable"]
        code = pytest.main([*options, "-m", marker, *of_pytest], plugins=[Watch(outcomes)])
    results = outcomes.results()
    print(f"{path}: " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(results["total"].items())))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and outcomes.passed:
        code = pytest.ExitCode.OK  # everything had passed before
    return int(code) or int(bool(results["failed"]))
