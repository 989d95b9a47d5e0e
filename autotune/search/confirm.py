"""Whether the entries of a database hold on the device at hand: each is raced against the heuristic again."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

from xsake._measure.environment import Facts
from xsake._measure.interference import ATTEMPTS
from xsake._measure.isolation import Caller, Failed
from xsake.autotune.problem import Problem
from xsake.autotune.result import of_race
from xsake.autotune.search.direction import Settings
from xsake.autotune.search.last_race import Race
from xsake.autotune.search.referee import Referee
from xsake.autotune.workloads import Workload
from xsake.tuning_db import HADS, Database, Entry, Key

CONFIRMED, REFUTED, BUSY, ABSENT = "confirmed", "not confirmed", "no verdict", "cannot run here"
MARGIN = 1.1  # an entry may promise so many times the gain that its race can show


@dataclasses.dataclass(frozen=True)
class Finding:
    entry: Entry
    state: str  # CONFIRMED, REFUTED, BUSY or ABSENT
    why: str
    renewed: Entry | None = None  # where the race shows a gain: the entry as this race and these kernels make it


def confirm(database: Database, worker: Caller) -> Iterator[Finding]:
    """A finding for each entry, those of one call one after another. Raises `Failed` without a device."""
    facts: Facts = worker.call("facts", limit=4 * Settings.limit)
    if facts.device_kind != database.device_kind:
        why = f"it is for {database.device_kind!r}, and this device is {facts.device_kind!r}"
        yield from (Finding(entry, ABSENT, why) for entry in database.entries)
        return
    alike: dict[Key, list[Entry]] = {}
    of_hads = [entry for entry in database.entries if entry.key.operation == HADS]
    yield from (Finding(entry, ABSENT, "xsake autotune --hads races it again") for entry in of_hads)
    for entry in database.entries:
        if entry.key.operation == HADS:
            continue
        alike.setdefault(dataclasses.replace(entry.key, direction="", density=None), []).append(entry)
    for entries in alike.values():
        try:
            problem = _problem(entries)
            referee = Referee(worker, problem, Settings.limit)
        except (Failed, ValueError) as failure:
            yield from (Finding(entry, ABSENT, str(failure)) for entry in entries)
            continue
        for entry in entries:
            try:
                yield Finding(entry, *_race(entry, referee, problem.workload.name, facts))
            except Failed as failure:
                yield Finding(entry, ABSENT, str(failure))


def _problem(entries: list[Entry]) -> Problem:
    """The calls of these entries, which differ only in direction and density. ValueError if there is no such call."""
    key = entries[0].key
    kv_heads = max(1, key.heads // key.group)
    workload = Workload(
        name=f"1x{key.q_len}x{kv_heads * key.group}x{key.head_dim}",
        batch=1,
        q_heads=kv_heads * key.group,
        kv_heads=kv_heads,
        length=key.q_len,
        head_dim=key.head_dim,
        is_causal=key.causal,
        block=key.block_q,
        kv_length=key.kv_len,
        value_dim=key.value_dim,
        block_kv=key.block_kv,
    )
    densities = dict.fromkeys(None if d is None else workload.to_ask_for(d) for d in map(_density, entries))
    return Problem(workload=workload, dtype=key.dtype, densities=tuple(densities), implementation=key.implementation)


def _density(entry: Entry) -> float | None:
    """The density that the entry was measured at, or else its bucket's."""
    measured: Any = entry.about.get("measured")
    return entry.key.density if entry.key.density is None or not measured else float(measured[0]["density"])


def _race(entry: Entry, referee: Referee, workload: str, facts: Facts) -> tuple[str, str, Entry | None]:
    """The state of an entry, why, and the entry renewed. Raises `Failed`."""
    plan = next((plan for plan in referee.plans if plan.key == entry.key), None)
    if plan is None:
        return ABSENT, "here such calls leave no choice, or belong to another entry", None
    config = dict(entry.config)
    if config == plan.default:
        return CONFIRMED, "it is the heuristic's configuration", None
    for _ in range(ATTEMPTS):
        race = Race(referee, plan, [plan.default, config], Settings.final_rounds)
        disturbed = race.disturbance(1)
        if disturbed is None:
            break
    promised, gain = float(entry.about.get("speedup", 1.0)), race.gains[1]
    told = f"{promised:.2f}x is written, the race shows {gain}"
    if disturbed is not None:
        return BUSY, f"the machine is busy ({disturbed}); {told}", None
    if (problem := referee.verify(plan, config).problem) is not None:
        return REFUTED, f"its result is wrong: {problem}", None
    if gain.low <= 1:
        return REFUTED, told, None
    raced = of_race(gain, race.measured(1, workload), race.contended.share)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"source": "measured", "kernel": plan.kernel, "date": date, "environment": facts.environment_id}
    renewed = dataclasses.replace(entry, about=dict(entry.about) | raced | made)
    return CONFIRMED if promised <= MARGIN * gain.high else REFUTED, told, renewed
