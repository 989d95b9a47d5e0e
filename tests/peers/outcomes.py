"""A pytest plugin: a peer's tests call xsake, and must fail where the peer's file expects it, and nowhere else."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peer", required=True, type=Path, help="the peer's .toml file")


def pytest_configure(config: pytest.Config) -> None:
    peer = tomllib.loads(config.getoption("peer").read_text())
    if "route" in peer:
        importlib.import_module(peer["route"])
    config.pluginmanager.register(Outcomes(peer.get("only", ".*"), peer.get("expected", [])))


class Outcomes:
    """`only` and each expectation's `test` match a test's whole name (Class::test), `error` a part of the message."""

    def __init__(self, only: str, expected: list[dict[str, str]]):
        self.only = only
        self.expected = expected
        self.met: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if re.fullmatch(self.only, _name(item))]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> pytest.TestReport:
        report = yield
        expected = next((each for each in self.expected if re.fullmatch(each["test"], _name(item))), None)
        if expected is None or report.when != "call" or report.skipped:
            return report
        self.met.add(expected["test"])
        if report.passed:
            report.outcome = "failed"
            report.longrepr = f"passes, but is expected to fail: {expected['reason']}"
        elif re.search(expected["error"], str(call.excinfo.value)):
            report.outcome = "skipped"
            report.wasxfail = expected["reason"]
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        unmet = [each["test"] for each in self.expected if each["test"] not in self.met]
        if unmet and not session.config.option.keyword:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nexpected to fail, but not run: {', '.join(unmet)}")


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]
