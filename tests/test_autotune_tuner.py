"""The tuning loop with `tuning_fakes.Service` in place of a device: its winners, its budget, failures and kills."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import optuna
import pytest
import tuning_fakes
from rich.console import Console
from tuning_fakes import ONE_DENSITY, PROBLEM, part, run_tuner, start, tune

from xsake._measure.isolation import Died, Hung, Raised, Worker
from xsake.autotune.search import direction, pace, referee, tuner
from xsake.autotune.search.storage import open_storage
from xsake.autotune.search.study import Candidate, Study
from xsake.autotune.write import report
from xsake.dashboard.read.study_reader import studies_of
from xsake.dashboard.show.tuning_documents import Tuning
from xsake.tuning_db import Database


def tried(result) -> dict[tuple, str]:
    return {(t.part["tile"], t.part["how"]): t.state for t in result.tried}


def test_the_fastest_is_found_and_written(tmp_path):
    done = tune(tmp_path)
    assert [r.config for r in done.results] == [part(2)] * 2, "one study per density"
    assert [r.gain.median for r in done.results] == [pytest.approx(2.0)] * 2
    first = done.results[0]
    assert tried(first) == {(4, "well"): "complete", (8, "well"): "slower", (2, "well"): "complete"} | {
        (n, "well"): tried(first)[n, "well"] for n in (3, 5)
    }
    assert first.tried[0].part == tuning_fakes.DEFAULT and first.tried[0].value == 1.0, "the heuristic is trial 0"
    database = Database.read(tmp_path / "fake_9000.json")
    entry = database.exact(first.plan.key)
    assert entry.config == part(2)
    assert entry.about["speedup"] == pytest.approx(2.0) and entry.about["source"] == "measured"
    assert entry.about["measured"][0]["default"] == {"median": 4000.0, "low": 4000.0, "high": 4000.0, "rounds": 15}
    assert database.environments == {entry.about["environment"]: tuning_fakes.ENVIRONMENT}


def test_the_table_of_results_fits_in_80_columns(tmp_path):
    (result,) = tune(tmp_path, ONE_DENSITY).results
    registers = {"tile": 2, "compute_registers": 240}
    plan = dataclasses.replace(result.plan, default=registers | {"tile": 64, "compute_registers": 232})
    console = Console(width=80, file=io.StringIO())
    report.show([dataclasses.replace(result, plan=plan, config=registers)], console)
    printed = console.file.getvalue()
    row = "forward 100.0% 4.000 2.000 2.00x tile=2, 5 of 5 2.00-2.00 compute_registers=240"
    assert "fake, blocks 32 x 32: milliseconds per call" in printed and row in " ".join(printed.split())
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80


def test_trials_cap(tmp_path):
    done = tune(tmp_path, trials=2)
    assert [len(r.tried) for r in done.results] == [2, 2]


def test_every_trouble_is_survived_and_recorded(tmp_path):
    done = tune(tmp_path, ONE_DENSITY, service=tuning_fakes.Troubled, isolate=True, limit=0.4)
    (result,) = done.results
    assert result.config == part(2), "the fastest that is right"
    assert tried(result) == {
        (4, "well"): "complete",
        (2, "well"): "complete",
        (9, "well"): "slower",
        (1, "wrong"): "wrong",
        (1, "hangs"): "failed",
        (1, "dies"): "failed",
        (1, "raises"): "failed",
        (1, "does not compile"): "failed",
        (1, "crashes the compiler"): "failed",
    }
    reasons = {t.part["how"]: t.reason for t in result.tried if t.reason}
    assert "max error 0.5" in reasons["wrong"]
    assert "did not end within" in reasons["hangs"]
    assert "exit code 7" in reasons["dies"]
    assert "RuntimeError: out of memory" in reasons["raises"]
    assert "ValueError: no such tile" in reasons["does not compile"]
    assert "exit code -11" in reasons["crashes the compiler"]
    entry = Database.read(done.path).exact(result.plan.key)
    assert entry.about["trials"] == {"complete": 2, "slower": 1, "wrong": 1, "failed": 5}


def test_a_slow_configuration_is_checked_too(tmp_path):
    class Wrong(tuning_fakes.Service):
        parts = (tuning_fakes.DEFAULT, part(3), part(5, "wrong"))

    (result,) = tune(tmp_path, ONE_DENSITY, service=Wrong).results
    assert tried(result) == {(4, "well"): "complete", (3, "well"): "complete", (5, "wrong"): "wrong"}


def test_a_heuristic_that_fails_leaves_no_entry(tmp_path):
    done = tune(tmp_path, service=tuning_fakes.BadHeuristic)
    assert [r.config for r in done.results] == [None, None]
    assert "out of memory" in done.results[0].failure
    assert not done.path.exists()


def test_optuna_has_one_parameter_the_configuration(tmp_path):
    tune(tmp_path, ONE_DENSITY, trials=3, service=tuning_fakes.Troubled)
    (trials,) = [trials for _, trials in studies_of(tmp_path / "studies.journal")]
    assert [t.params["configuration"] for t in trials[:1]] == ['tile=4, how="well"']
    assert all(list(t.params) == ["configuration"] for t in trials)
    assert {len(t.distributions["configuration"].choices) for t in trials} == {len(tuning_fakes.Troubled.parts)}


def test_a_second_run_resumes(tmp_path):
    first = tune(tmp_path, trials=2)
    second = tune(tmp_path)
    assert [len(r.tried) for r in second.results] == [5, 5]
    assert [t.part for t in second.results[0].tried[:2]] == [t.part for t in first.results[0].tried]


def test_a_study_with_a_parameter_per_field_goes_on(tmp_path):
    """Such studies were stored before; they also hold draws that were in no list. The dashboard shows all of them."""
    journal = tmp_path / "studies.journal"
    plan = tuning_fakes.Service().open(ONE_DENSITY)[0]
    name = Study(open_storage(tmp_path / "other.journal"), "Fake 9000", plan, 0).name
    old = optuna.create_study(storage=open_storage(journal), study_name=name)
    tiles = optuna.distributions.CategoricalDistribution([4, 8, 2, 3, 5])
    complete, pruned = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    for tile, state, value, attributes in (
        (4, complete, 1.0, {"end": "complete"}),
        (3, complete, 0.75, {"end": "complete"}),
        (8, pruned, None, {"end": "slower", "reason": "2.00 of the heuristic's time after 1 rounds"}),
        (3, pruned, None, {"reason": "tried already"}),
    ):
        part_of = {"part": part(tile)} if "end" in attributes else {}
        old.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=value,
                params={"tile": tile},
                distributions={"tile": tiles},
                user_attrs=part_of | attributes,
            )
        )
    old.enqueue_trial({"tile": 5})
    (result,) = tune(tmp_path, ONE_DENSITY).results
    assert [t.part["tile"] for t in result.tried[:3]] == [4, 3, 8] and result.config == part(2)
    assert sorted(t.part["tile"] for t in result.tried[3:]) == [2, 5], "only what was left"
    (shown,) = Tuning([journal], {}).overview()["studies"]
    assert (shown["trials"], shown["best_config"]) == (5, part(2))


@pytest.fixture
def clock(monkeypatch):
    """Time passes only in races."""
    now = [0.0]
    for module in (tuner, direction, pace, referee):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    real = tuning_fakes.Service.race

    def race(self, direction, density, parts):
        now[0] += 0.1 * len(parts)
        return real(self, direction, density, parts)

    monkeypatch.setattr(tuning_fakes.Service, "race", race)
    return now


def _three_problems():
    def named(n: int):
        return dataclasses.replace(PROBLEM, workload=dataclasses.replace(PROBLEM.workload, name=str(n)))

    return [named(n) for n in range(3)]


@pytest.mark.parametrize(("budget", "trials"), [(1000.0, 5), (42.0, 3), (25.0, 2)])
def test_budget_is_kept_and_shared(tmp_path, clock, budget, trials):
    done = tune(tmp_path, *_three_problems(), budget=budget, rounds=2, batch=2, service=Lengths)
    assert clock[0] <= budget
    counts = [len(r.tried) for r in done.results]
    assert len(counts) == 6 and all(r.config is not None for r in done.results)
    assert min(counts) >= trials, f"{counts}: every problem has its share"


def compiling_takes(clock, monkeypatch, seconds) -> None:
    """Compiling a configuration takes `seconds(problem)`, and nothing again while the problem is open."""
    real = Lengths.open

    def opened(self, problem):
        self.ready, self.seconds = set(), seconds(problem)
        return real(self, problem)

    def compiled(self, direction, parts):
        new = {(direction, p["tile"]) for p in parts} - self.ready
        clock[0] += self.seconds * len(new)
        self.ready |= new
        return [None for _ in parts]

    monkeypatch.setattr(Lengths, "open", opened)
    monkeypatch.setattr(Lengths, "compile", compiled)


def test_time_that_is_left_goes_to_those_who_had_too_little(tmp_path, clock, monkeypatch):
    """The first problem's configurations take longer to compile than its share of the time; the others' do not."""
    compiling_takes(clock, monkeypatch, lambda problem: 20.0 if problem.workload.name == "0" else 0.0)
    done = tune(tmp_path, *_three_problems(), budget=220.0, rounds=2, batch=14, service=Lengths)
    assert clock[0] <= 220
    assert [len(r.tried) for r in done.results] == [5] * 6 and all(r.config == part(2) for r in done.results)
    assert len(done.results) == 6, "a second turn replaces the first one's result"


def test_what_was_compiled_is_raced_although_compiling_took_the_whole_share(tmp_path, clock, monkeypatch):
    compiling_takes(clock, monkeypatch, lambda problem: 6.0)
    done = tune(tmp_path, *_three_problems(), budget=30.0, rounds=2, batch=14, service=Lengths)
    assert [len(r.tried) for r in done.results[:2]] == [2, 2] and all(done.results[n].config for n in (0, 1))


@pytest.fixture
def busy(clock, monkeypatch):
    """A busy machine: opening, compiling, racing and verifying are slow, and each of four densities adds to it."""

    def takes(method: str, seconds) -> None:
        real = getattr(tuning_fakes.Service, method)

        def slow(self, *arguments):
            clock[0] += seconds(*arguments)
            return real(self, *arguments)

        monkeypatch.setattr(tuning_fakes.Service, method, slow)

    takes("open", lambda problem: 20.0)
    takes("compile", lambda direction, parts: 2.0 * len(parts))
    takes("race", lambda direction, density, parts: 0.6 * len(parts))
    takes("verify", lambda direction, density, part: 3.0)
    return clock


FOUR = dataclasses.replace(PROBLEM, densities=(1.0, 0.5, 0.25, 0.1))


def test_a_short_budget_gives_one_entry_rather_than_half_of_many(tmp_path, busy):
    done = tune(tmp_path, FOUR, budget=60.0)
    assert busy[0] <= 60
    written = [r for r in done.results if r.config is not None]
    assert [r.plan.key.density for r in written] == [0.1], "the cheapest"
    assert len(Database.read(done.path)) == 1 and len(written[0].tried) == 2


def test_with_more_time_every_density_has_its_entry(tmp_path, busy):
    done = tune(tmp_path, FOUR, budget=400.0)
    assert busy[0] <= 400
    assert [len(r.tried) for r in done.results] == [5] * 4 and len(Database.read(done.path)) == 4
    first = Database.read(done.path).exact(done.results[-1].plan.key)
    assert first.about["measured"][0]["tuned"]["rounds"] == 15, "the early entry is replaced by a well measured one"


def test_what_an_entry_would_take_is_told_where_there_is_none(tmp_path, busy):
    done = run_tuner(tmp_path, FOUR, budget=25.0)
    assert not done.ledger.path.exists()
    needed = done.least_budget
    assert needed == 2 * busy[0]
    busy[0] = 0.0
    again = run_tuner(tmp_path / "again", FOUR, budget=needed)
    assert again.ledger.path.exists() and again.least_budget is None


def test_small_workloads_come_first(tmp_path, clock):
    opened = []

    class Sizes(tuning_fakes.Service):
        def open(self, problem):
            opened.append(problem.workload.length)
            return super().open(problem)

    lengths = (4096, 128, 1024)
    problems = [dataclasses.replace(PROBLEM, workload=dataclasses.replace(PROBLEM.workload, length=n)) for n in lengths]
    tune(tmp_path, *problems, trials=1, service=Sizes)
    assert opened[:3] == [128, 1024, 4096]


def test_without_time_nothing_is_written_and_that_is_said(tmp_path, clock):
    done = tune(tmp_path, budget=0.0)
    assert not done.results and not done.path.exists()
    done = tune(tmp_path, budget=0.3)
    assert {r.failure for r in done.results if r.config is None} <= {
        "the heuristic's configuration has no time: there was no time for it",
        "there was time for the heuristic's configuration only",
    }


def test_a_heuristic_alone_is_no_entry(tmp_path):
    done = tune(tmp_path, trials=1)
    assert {r.failure for r in done.results} == {"there was time for the heuristic's configuration only"}
    assert not done.path.exists()


class Lengths(tuning_fakes.Service):
    """Problems have different keys: the name of the workload sets the length."""

    def open(self, problem):
        length = dict(q_len=1 << int(problem.workload.name or 0), kv_len=128)
        return [dataclasses.replace(p, key=dataclasses.replace(p.key, **length)) for p in super().open(problem)]


def test_winners_are_hints_for_the_next_problem(tmp_path):
    done = tune(tmp_path, *_three_problems()[:2], service=Lengths)
    assert done.results[2].tried[1].part == part(2), "right after the heuristic"


def test_an_unwritable_folder_is_told_before_the_tuning(tmp_path):
    (tmp_path / "fake_9000.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(OSError, match="left alone: its schema_version is 99"):
        tune(tmp_path)


# -- processes that are killed, and processes that work together -----------------------------------------------------


def _start(folder: Path, service: str, *, isolate: bool = False) -> subprocess.Popen:
    code = f"""
import pathlib, tuning_fakes
folder = pathlib.Path({str(folder)!r})
tuning_fakes.tune(folder, service={service}, isolate={isolate})
"""
    return start(folder / f"tune{time.monotonic_ns()}.py", code)


def _wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _studies(folder: Path) -> list[Study]:
    storage = open_storage(folder / "studies.journal")
    return [Study(storage, "Fake 9000", plan, 0) for plan in tuning_fakes.Service().open(PROBLEM)]


@pytest.mark.slow  # the next two tests begin with the state that such a kill leaves
def test_kill_9_in_the_middle_of_a_study_loses_the_trial_in_flight_only(tmp_path):
    journal = tmp_path / "studies.journal"
    process = _start(tmp_path, "tuning_fakes.Slow", isolate=True)
    _wait_for(lambda: journal.exists() and journal.read_text().count('"end"') >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = journal.read_text().count('"end"')
    kept = sum(len(study.tried) for study in _studies(tmp_path))
    assert told - 1 <= kept <= told, "a trial may be told of and not yet closed"
    done = tune(tmp_path)
    assert [len(r.tried) for r in done.results] == [5, 5] and done.results[0].config == part(2)
    labels = [(t.part["tile"]) for t in done.results[0].tried]
    assert len(set(labels)) == 5, "nothing is tried twice"


def test_a_trial_killed_before_it_told_its_time_is_tried_again(tmp_path, monkeypatch):
    def killed(candidate, value):
        candidate.trial.set_user_attr("end", "complete")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Candidate, "complete", killed)
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has this number
        tune(tmp_path)
    done = tune(tmp_path)
    assert [len(r.tried) for r in done.results] == [5, 5] and all(r.config == part(2) for r in done.results)


def test_a_half_written_line_does_not_spoil_the_journal(tmp_path):
    tune(tmp_path, trials=2)
    with (tmp_path / "studies.journal").open("a") as file:
        file.write('{"op_code": 4, "worker_')
    done = tune(tmp_path)
    assert [len(r.tried) for r in done.results] == [5, 5]


def test_two_processes_share_a_study(tmp_path):
    processes = [_start(tmp_path, "lambda: tuning_fakes.Pair(folder)") for _ in range(2)]
    assert [p.wait(60) for p in processes] == [0, 0]
    for study in _studies(tmp_path):
        assert len(study.tried) >= 5 and not study.untried
        assert study.best[0].part == part(2)
        by = {t.user_attrs["by"] for t in study._study.trials if "by" in t.user_attrs}
        assert len(by) == 2, "both had a share"
    assert len(Database.read(tmp_path / "fake_9000.json")) == 2


# -- the worker ------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker():
    worker = Worker(tuning_fakes.Service)
    yield worker
    worker.close()


@pytest.mark.slow  # test_every_trouble_is_survived_and_recorded has these failures
def test_a_worker_is_replaced_after_a_failure(worker):
    assert worker.call("race", "forward", 1.0, [part(2)], limit=60.0).seconds == [0.002]
    with pytest.raises(Hung, match=r"race did not end within 0.2 s"):
        worker.call("race", "forward", 1.0, [part(2, "hangs")], limit=0.2)
    assert worker.restarts == 1
    with pytest.raises(Died, match="exit code 7"):
        worker.call("race", "forward", 1.0, [part(2, "dies")], limit=60.0)
    assert worker.restarts == 2
    with pytest.raises(Raised, match="out of memory"):
        worker.call("race", "forward", 1.0, [part(2, "raises")], limit=60.0)
    assert worker.restarts == 2, "an ordinary error needs no new process"
    assert worker.call("race", "forward", 1.0, [part(2)], limit=60.0).seconds == [0.002]


def test_a_hanging_worker_ends_with_its_parent_and_its_own_worker_too(tmp_path):
    code = """
import tuning_fakes
from xsake._measure.isolation import Worker
worker = Worker(tuning_fakes.WithWorker)
print(worker._process.pid, worker.call("child", limit=60.0), flush=True)
worker.call("race", "forward", 1.0, [tuning_fakes.part(1, "hangs")], limit=600.0)
"""
    logs = tmp_path / "logs"
    logs.mkdir()
    parent = start(tmp_path / "parent.py", code, stdout=subprocess.PIPE, env={"TMPDIR": str(logs)})
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for pid in pids:
        _wait_for(lambda pid=pid: _has_ended(Path(f"/proc/{pid}")))
    assert not list(logs.glob("xsake-worker-*"))


def _has_ended(process: Path) -> bool:
    try:
        return "Z" in (process / "stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_no_child_is_left():
    assert not multiprocessing.active_children()
