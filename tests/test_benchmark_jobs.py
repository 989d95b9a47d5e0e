"""Benchmarks that compile side by side and race in turn."""

import argparse
import json
import sys
import time

import pytest

from benchmarks.harness import jobs
from benchmarks.harness.jobs import Job

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
