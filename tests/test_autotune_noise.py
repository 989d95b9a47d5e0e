"""The tuner on a busy machine: what proves a gain, what is waited out, and what a budget cuts short."""

from __future__ import annotations

import dataclasses
import json
import random

import jsonschema
import pytest
import tuning_fakes
from tuning_fakes import DEFAULT, ONE_DENSITY, Quiet, part, tune

from xsake import tuning_db
from xsake._measure.interference import Contention
from xsake._measure.isolation import Hung, InProcess
from xsake._measure.ratio import FEWEST_ROUNDS, Ratio
from xsake.autotune.measure.contest import Round
from xsake.autotune.search import confirm, direction, pace, referee, tuner
from xsake.autotune.search.direction import Settings
from xsake.autotune.search.storage import open_storage
from xsake.autotune.workloads import Workload
from xsake.autotune.write import progress
from xsake.tuning_db import Database

BUSY = Contention(ran=1.0, waited=5.0)


class Noisy(tuning_fakes.Service):
    """Times vary by a tenth; the heuristic's tile is 4, and the best is 3."""

    parts = (DEFAULT, part(3), part(6))
    noise = random.Random(0)

    def race(self, direction, density, parts):
        if any(p["how"] == "raises" for p in parts):
            raise RuntimeError("out of memory")
        return Round([p["tile"] * 1e-3 * self.noise.uniform(0.95, 1.05) for p in parts])


class Busy(Noisy):
    """Load makes the heuristic seven times slower, and others not: what was seen on a machine with two cores."""

    opened, calm_after = 0, 10**6

    def open(self, problem):
        self.opened += 1
        return super().open(problem)

    def race(self, direction, density, parts):
        if self.opened > self.calm_after:
            return super().race(direction, density, parts)
        return Round([p["tile"] * 1e-3 * (7 if p == DEFAULT else 1) for p in parts], BUSY)


def test_a_true_gain_is_written_with_its_interval(tmp_path):
    (result,) = tune(tmp_path, ONE_DENSITY, service=Noisy).results
    entry = Database.read(tmp_path / "fake_9000.json").exact(result.plan.key)
    gain = entry.about["gain"]
    assert entry.config == part(3) and 1 < gain["low"] < 4 / 3 < gain["high"] < 1.45
    assert gain["low"] < entry.about["speedup"] < gain["high"] and gain["rounds"] == 15 and gain["waited"] == 0
    assert f"{entry.about['speedup']:.2f}x ({gain['low']:.2f} to {gain['high']:.2f} in 15" in progress.line(result)
    schema = json.loads((tuning_db.SHIPPED / "schema.json").read_text())
    gain_of = schema["$defs"]["entry"]["properties"]["gain"]
    jsonschema.Draft202012Validator(gain_of).validate(gain)


def test_a_busy_machine_proves_nothing(tmp_path):
    done = tune(tmp_path, ONE_DENSITY, service=Busy)
    (result,) = done.results
    assert not done.path.exists() and result.disturbed
    assert "busy" in result.failure and "waited for a core 5.00 s" in result.failure and "it shows" in result.failure


def test_a_busy_time_is_waited_out(tmp_path):
    class Passing(Busy):
        calm_after = 2

    (result,) = tune(tmp_path, ONE_DENSITY, service=Passing).results
    assert result.config == part(3) and result.gain.low < 4 / 3 < result.gain.high


def test_a_busy_round_is_raced_again(tmp_path):
    class Sometimes(Busy):
        rounds = 0

        def race(self, direction, density, parts):
            self.rounds += 1
            self.calm_after = 0 if self.rounds % 3 else 10**6
            return super().race(direction, density, parts)

    (result,) = tune(tmp_path, ONE_DENSITY, service=Sometimes).results
    assert result.config == part(3) and result.gain.high < 1.45 and result.waited == 0 and result.gain.rounds == 15


@pytest.mark.parametrize("seed", range(4))
def test_spikes_that_nobody_sees_give_no_gain(tmp_path, seed):
    """No contention is told, as on other devices: in half of the turns a configuration takes seven times as long."""

    class Spiky(tuning_fakes.Service):
        parts = (DEFAULT, part(4, "as well"), part(4, "also well"))
        noise = random.Random(seed)

        def race(self, direction, density, parts):
            return Round([4e-3 * self.noise.choice((1, 7)) for _ in parts])

    (result,) = tune(tmp_path, ONE_DENSITY, service=Spiky).results
    assert result.config in (None, DEFAULT)


def test_a_busy_round_stops_no_trial(tmp_path):
    (result,) = tune(tmp_path, ONE_DENSITY, service=Busy).results
    assert {t.state for t in result.tried} == {"complete"}


def test_intervals():
    noise = random.Random(1)
    missed = 0
    for _ in range(2000):
        gain = Ratio.of([noise.lognormvariate(0, 1) for _ in range(15)])
        missed += not gain.low <= 1 <= gain.high
    assert missed / 2000 < 0.02, "they hold the median 99 times in 100"
    assert Ratio.of([1.1] * FEWEST_ROUNDS).low > 1 > Ratio.of([1.1] * (FEWEST_ROUNDS - 1) + [0.9]).low
    with pytest.raises(ValueError, match="7 rounds are too few for an interval: race 8 at least"):
        Ratio.of([2.0] * (FEWEST_ROUNDS - 1))


@pytest.mark.parametrize("slow", referee._STEPS)
def test_a_budget_cuts_a_long_step_short(tmp_path, monkeypatch, slow):
    now = [0.0]
    for module in (tuner, direction, pace, referee):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])

    class Limited(InProcess):
        """A worker whose limits hold: the step `slow` takes 500 s, others take 0.1 s."""

        def call(self, method, *arguments, limit):
            takes = 500.0 if method == slow else 0.1
            now[0] += min(takes, limit)
            if takes > limit:
                raise Hung(f"{method} did not end within {limit:g} s")
            return super().call(method, *arguments, limit=limit)

    studies = open_storage(tmp_path / "studies.journal")
    run = tuner.Tuner(Limited(tuning_fakes.Service), studies, tmp_path, Settings(budget=60.0, limit=600.0), Quiet())
    run.tune([ONE_DENSITY])
    assert run.cut_short == f"{referee._STEPS[slow]} did not end" and now[0] == pytest.approx(66.0)


# -- racing what is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "config", "speedup", "state", "told"),
    [
        (Noisy, part(3), 1.3, confirm.CONFIRMED, "1.30x is written, the race shows 1.3"),
        (Noisy, part(3), 6.96, confirm.REFUTED, "6.96x is written, the race shows 1.3"),
        (Noisy, part(6), 1.3, confirm.REFUTED, "1.30x is written, the race shows 0.6"),
        (Noisy, DEFAULT, 1.0, confirm.CONFIRMED, "it is the heuristic's configuration"),
        (Busy, part(3), 1.3, confirm.BUSY, "threads waited for a core 5.00 s"),
        (Noisy, part(3, "raises"), 1.3, confirm.ABSENT, "out of memory"),
        (Noisy, part(3, "wrong"), 1.3, confirm.REFUTED, "its result is wrong: out: max error 0.5"),
    ],
)
def test_an_entry_is_raced_again(service, config, speedup, state, told):
    found = dataclasses.replace(tuning_fakes.entry(), config=config, about={"speedup": speedup})
    (finding,) = confirm.confirm(Database("Fake 9000", [found]), InProcess(service))
    assert finding.entry == found and finding.state == state and told in finding.why


def test_entries_that_cannot_run_here():
    (finding,) = confirm.confirm(Database("NVIDIA H200", [tuning_fakes.entry()]), InProcess(Noisy))
    assert finding.state == confirm.ABSENT
    assert finding.why == "it is for 'NVIDIA H200', and this device is 'Fake 9000'"
    entries = [tuning_fakes.entry(dtype="float64"), tuning_fakes.entry(direction="backward")]
    findings = list(confirm.confirm(Database("Fake 9000", entries), InProcess(Noisy)))
    assert {finding.state for finding in findings} == {confirm.ABSENT}
    assert {finding.why[:15] for finding in findings} == {"dtype='float64'", "here such calls"}


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("changes", [{}, {"is_causal": False}, {"kv_length": 300, "block_kv": 16}], ids=str)
def test_the_density_to_ask_for(changes, density):
    sizes = dict(name="w", batch=1, q_heads=32, kv_heads=32, length=512, head_dim=16, is_causal=True, block=32)
    workload = Workload(**sizes | changes)
    true = float(workload.mask(workload.to_ask_for(density)).density())
    assert true == pytest.approx(max(density, float(workload.mask(1e-9).density())), abs=0.02)
