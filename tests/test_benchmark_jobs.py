"""Processes of the benchmarks: jobs compile side by side and race in turn; outcomes of test runs become one record."""

import argparse
import json
import subprocess
import sys
import time

import pytest

from benchmarks.harness import jobs, outcomes
from benchmarks.harness.jobs import Job
from benchmarks.record import ROOT

# A benchmark that takes turns: says when it has compiled, and when it begins and ends its races.
TURNS = """
import pathlib, sys, time
from benchmarks.harness import turns
def say(what): open({log!r}, "a").write({name!r} + " " + what + "\\n")
time.sleep({compiles}); say("compiled"); turns.begin(); say("races"); time.sleep(0.3); say("ends")
"""


def job(tmp_path, name: str, program: str, **values) -> Job:
    program = program.format(log=str(tmp_path / "said"), name=name, **values)
    return Job(name, [sys.executable, "-c", program], tmp_path / "logs" / f"{name}.log")


def run(together, alone, seconds: float = 60, out=None) -> None:
    jobs.run(together, alone, deadline=time.monotonic() + seconds, out=out)


def test_all_compile_before_one_races_and_each_races_alone(tmp_path):
    together = [job(tmp_path, "first", TURNS, compiles=0.5), job(tmp_path, "second", TURNS, compiles=0)]
    alone = [job(tmp_path, "third", TURNS, compiles=0)]
    run(together, alone)
    said = (tmp_path / "said").read_text().splitlines()
    assert sorted(said[:2]) == ["first compiled", "second compiled"]
    assert said[2:] == [f"{who} {what}" for who in ("first", "second") for what in ("races", "ends")] + [
        f"third {what}" for what in ("compiled", "races", "ends")
    ]
    assert [one.status for one in together + alone] == ["done"] * 3
    assert all(one.compiled is not None for one in together)


def test_one_that_fails_does_not_stop_the_others(tmp_path):
    failing = job(tmp_path, "failing", "import sys; print('no GPU'); sys.exit(3)")
    other = job(tmp_path, "other", TURNS, compiles=0)
    run([failing, other], [])
    assert failing.status.startswith("failed with exit code 3: see ") and failing.log.read_text() == "no GPU\n"
    assert other.status == "done"


def test_nothing_goes_on_after_the_time_is_over(tmp_path):
    slow, never = job(tmp_path, "slow", "import time; time.sleep(60)"), job(tmp_path, "never", TURNS, compiles=0)
    run([slow], [never], seconds=0.5)
    assert slow.status == "cut off" and slow.process is not None and slow.process.poll() is not None
    assert never.status == "not run" and never.process is None


def test_an_unknown_benchmark_is_refused():
    given = jobs.options_of(("peers", "decode"))
    assert given("peers=--rounds=3") == ("peers", "--rounds=3")
    with pytest.raises(argparse.ArgumentTypeError, match="no such benchmark: pears; there are peers, decode"):
        given("pears=--rounds 3")


RECORDS = """
import json, pathlib
out = pathlib.Path({out!r}); out.mkdir(parents=True)
found = {{"environment": {{"commit": "1", "command": {name!r}}}, "results": [{name!r}]}}
(out / "races.json").write_text(json.dumps(found))
"""


def test_the_records_of_parts_are_joined(tmp_path):
    parts = [job(tmp_path, name, RECORDS, out=str(tmp_path / name)) for name in ("first", "second")]
    for one in parts:
        one.out = tmp_path / one.name
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "old.json").write_text("{}")  # of an earlier run
    run(parts, [], out=tmp_path)
    assert json.loads((tmp_path / "races.json").read_text()) == {
        "environment": {"commit": "1", "command": "first; second"},
        "results": ["first", "second"],
    }
    assert not (tmp_path / "old.json").exists()


def test_a_benchmark_has_parts_unless_its_options_say_which(tmp_path):
    options, folders = [f"--tokens {n}" for n in (65536, 32768)], (tmp_path, tmp_path / "logs")
    parts = jobs.jobs_of("selection", options, "--peers ejkernel", *folders)
    assert [part.name for part in parts] == ["selection-65536", "selection-32768"]
    assert parts[0].command[-4:] == ["--tokens", "65536", "--peers", "ejkernel"]
    (whole,) = jobs.jobs_of("selection", options, "--tokens 4096", *folders)
    assert whole.name == "selection" and whole.out is None


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
RUN = """
import json, pathlib, sys
from benchmarks.harness import outcomes
environment, path, *of_pytest = sys.argv[1:]
sys.exit(outcomes.run(json.loads(environment), pathlib.Path(path), "gpu", of_pytest))
"""


def run_tests(folder, *more, **environment):
    command = [sys.executable, "-c", RUN, json.dumps(HERE | environment), str(folder / "out" / "gpu_tests.json")]
    command += ["-q", "-c", str(folder / "pytest.ini"), str(folder), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ran = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
    (folder / "ran").unlink(missing_ok=True)
    return done, ran


def test_a_second_run_leaves_out_what_passed(tmp_path):
    options = ["addopts = -m none -p no:cacheprovider", "markers = gpu", "filterwarnings = error"]
    (tmp_path / "pytest.ini").write_text("\n".join(["[pytest]", *options]))
    (tmp_path / "test_some.py").write_text("import pytest\npytestmark = pytest.mark.gpu\n" + TESTS)
    done, ran = run_tests(tmp_path)
    record = json.loads((tmp_path / "out" / "gpu_tests.json").read_text())
    assert done.returncode == 1 and ran == ["good", "mended", "skipped", "ends badly"], done.stdout + done.stderr
    assert record["results"]["total"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert record["results"]["failed"] == ["test_some.py::test[ends badly]", "test_some.py::test[mended]"]
    reasons = {name: test.get("reason", "") for name, test in record["results"]["tests"].items()}
    assert "not mended yet" in reasons["test_some.py::test[mended]"]
    assert "no such device" in reasons["test_some.py::test[skipped]"]

    (tmp_path / "mended").touch()
    done, ran = run_tests(tmp_path, "-k", "mended")
    record = json.loads((tmp_path / "out" / "gpu_tests.json").read_text())
    assert ran == ["mended"] and record["results"]["total"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert done.returncode == 1  # one test of the record has failed, though not in this run


def recorded(folder, **environment):
    path = folder / "gpu_tests.json"
    path.write_text(json.dumps({"environment": HERE, "results": {"tests": {"a": {"outcome": "passed"}}}}))
    return outcomes.Outcomes.resume(HERE | environment, path).passed


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
    done, _ = run_tests(tmp_path, platform="cpu", device="some CPU")
    assert done.returncode == 1 and "no GPU here, but some CPU" in done.stderr
