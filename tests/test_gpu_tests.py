"""The record of the tests that need a GPU: outcomes of several runs become one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import tests as gpu_tests

ROOT = Path(__file__).resolve().parents[1]
HERE = {"commit": "abc", "device": "H200", "python": "3.12.0", "versions": {"jax": "0.11.2"}, "platform": "gpu"}
TESTS = """
import pathlib
import pytest

PLACE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("name", ["good", "mended", "skipped", "ends badly"])
def test(name, request):
    with open(PLACE / "ran", "a") as file:
        print(name, file=file)
    if name == "skipped":
        pytest.skip("no such device")
    if name == "ends badly":
        request.addfinalizer(lambda: 1 / 0)
    assert name != "mended" or (PLACE / "mended").exists(), "not mended yet"
"""
SCRIPT = """
import json, sys
from benchmarks.gpu import tests as gpu_tests
gpu_tests._environment = lambda arguments: json.loads(sys.argv[1])
sys.exit(gpu_tests.main(sys.argv[2:]))
"""


def run(folder, *more, **environment):
    command = ["-q", "-c", str(folder / "pytest.ini"), str(folder), "--out", str(folder / "out"), *more]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(HERE | environment), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    ran = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
    (folder / "ran").unlink(missing_ok=True)
    return done, ran


def test_a_second_run_leaves_out_what_passed(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m none -p no:cacheprovider\nmarkers = gpu")
    (tmp_path / "test_some.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n" + TESTS)
    done, ran = run(tmp_path)
    record = json.loads((tmp_path / "out" / "gpu_tests.json").read_text())
    assert done.returncode == 1 and ran == ["good", "mended", "skipped", "ends badly"], done.stdout + done.stderr
    assert record["results"]["total"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert record["results"]["failed"] == ["test_some.py::test[ends badly]", "test_some.py::test[mended]"]
    reasons = {name: test.get("reason", "") for name, test in record["results"]["tests"].items()}
    assert "not mended yet" in reasons["test_some.py::test[mended]"]
    assert "no such device" in reasons["test_some.py::test[skipped]"]

    (tmp_path / "mended").touch()
    done, ran = run(tmp_path, "-k", "mended")
    record = json.loads((tmp_path / "out" / "gpu_tests.json").read_text())
    assert ran == ["mended"] and record["results"]["total"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert done.returncode == 1  # one test of the record has failed, though not in this run


def recorded(folder, **environment):
    path = folder / "gpu_tests.json"
    path.write_text(json.dumps({"environment": HERE, "results": {"tests": {"a": {"outcome": "passed"}}}}))
    return gpu_tests.Outcomes.resume(HERE | environment, path).passed


def test_outcomes_of_another_commit_device_or_version_do_not_count(tmp_path, capsys):
    assert recorded(tmp_path) == ["a"]
    for other in (dict(commit="abd"), dict(device="A100"), dict(versions={"jax": "0.12.0"})):
        assert recorded(tmp_path, **other) == []
        assert f"of another {next(iter(other))}" in capsys.readouterr().out


@pytest.mark.parametrize("commit", ["unknown", "abc-dirty"])
def test_outcomes_of_uncommitted_code_do_not_count(tmp_path, monkeypatch, commit):
    monkeypatch.setitem(HERE, "commit", commit)
    assert recorded(tmp_path) == []


def test_without_a_gpu_it_says_so(tmp_path):
    done, _ = run(tmp_path, platform="cpu", device="some CPU")
    assert done.returncode == 1 and "no GPU here, but some CPU" in done.stderr
