"""`tests/peers/outcomes.py`: a run of a peer's tests is green exactly when nothing unexpected happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parent / "peers"
TESTS = """
import unittest

class Test(unittest.TestCase):
    def test_right(self):
        pass

    def test_wrong(self):
        raise NotImplementedError("dropout_rate=0.1")

class Elsewhere(unittest.TestCase):
    def test_of_something_else(self):
        assert False
"""


def expectation(test, error="dropout"):
    return f'[[expected]]\ntest = "{test}"\nerror = "{error}"\nreason = "Dropout is refused."\n'


@pytest.mark.parametrize(
    ("expected", "green", "message"),
    [
        (expectation("Test::test_wrong"), True, "1 passed, 1 xfailed"),
        ("", False, "1 failed, 1 passed"),
        (expectation("Test::test_wrong", error="NaN"), False, "dropout_rate=0.1"),
        (expectation("Test::test_.*"), False, "passes, but is expected to fail: Dropout is refused."),
        (expectation("Test::test_wrong") + expectation("Test::test_gone"), False, "not run: Test::test_gone"),
    ],
    ids=["as_expected", "unexpected", "another_error", "passes", "gone"],
)
def test_outcomes(tmp_path, expected, green, message):
    (tmp_path / "peer.toml").write_text('only = "Test::.*"\n' + expected)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_peer.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "--peer", "peer.toml", "test_peer.py"]
    environment = dict(os.environ, PYTHONPATH=str(PEERS), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode == 0) == green
    assert message in run.stdout
