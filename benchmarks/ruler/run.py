"""Run samples in every way and record each answer as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.ruler.prepared import Prepared
from benchmarks.ruler.prompt import Made, Sample
from benchmarks.ruler.question import Task
from benchmarks.ruler.score import begins
from benchmarks.ruler.warm_up import warm_up
from benchmarks.ruler.way import Way, answer
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.records import KEY, Records
from xsake.model import HadsBudget


def run(
    model: Any,
    prompts: Made | Prepared,
    records: Records,
    *,
    tasks: Mapping[str, Task],
    lengths: Sequence[int],
    ways: Sequence[Way],
    samples: int,
    profile_for: Callable[[int], HadsProfile | None],
    batch: int = 1,
    chunk: int | None = None,
    progress: Callable[[str, int], None] = lambda what, done: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Every sample of every task and length, in every way; returns whether all was done.

    Dense reading needs no profile: `profile_for` may return None where nothing else is asked for. What `records` has is
    not run again. All tasks get their first samples before any gets more, so that a run that is
    cut off has about as many of each. `progress` is called with what comes next, and how many answers were done;
    `stop` is asked before each batch and way whether to leave the rest.
    """
    # What cannot be run is refused now, not after hours.
    for length in lengths:
        _check(model, length, profile_for(length), ways)
    prompts.check(tasks, lengths, samples)
    if jax.default_backend() != "cpu":  # a CPU compiles in seconds, and reads a long prompt in minutes
        progress("compiling", 0)
        warm_up(model, ways=ways, lengths=lengths, profile_for=profile_for, batch=batch, chunk=chunk)
    for length in lengths:
        profile = profile_for(length)
        for name, numbers in _batches(tasks, samples, batch):
            left = [way for way in ways if any(_key(name, length, n, way) not in records for n in numbers)]
            progress(f"{name} at {length}", (len(ways) - len(left)) * len(numbers))
            if not left:
                continue
            some = [prompts.sample(name, tasks[name], length, n) for n in numbers]
            for way in left:
                if stop():
                    return False
                progress(f"{name} at {length}, {way}", 0)
                _run_batch(model, prompts, records, some, way, length, profile, batch, chunk)
                progress(f"{name} at {length}, {way}", len(numbers))
    return True


def _check(model: Any, length: int, profile: HadsProfile | None, ways: Sequence[Way]) -> None:
    if length > model.config.context:
        raise ValueError(f"{length} tokens are beyond the model's context of {model.config.context}")
    sparse = [way for way in ways if way.method != "dense"]
    if not sparse:
        return
    if profile is None:
        raise ValueError(f"{', '.join(map(str, sparse))} need a profile of the model at {length} tokens")
    if length % profile.block_q:
        raise ValueError(f"{length} tokens must be a multiple of the profile's rows of {profile.block_q}")
    for budget in {way.budget for way in sparse}:
        HadsBudget(profile, budget).check(model.config, length)
        layer_counts(profile, budget, length)


def _batches(tasks: Mapping[str, Task], samples: int, batch: int) -> Iterator[tuple[str, range]]:
    for first in range(0, samples, batch):
        for name in tasks:
            yield name, range(first, min(first + batch, samples))


def _key(name: str, length: int, sample: int, way: Way) -> tuple[str, str, float, str]:
    return f"{name}/{length}/{sample}", way.method, way.budget, "profile"


def _run_batch(
    model: Any,
    source: Made | Prepared,
    records: Records,
    samples: Sequence[Sample],
    way: Way,
    length: int,
    profile: HadsProfile | None,
    batch: int,
    chunk: int | None,
) -> None:
    start = time.perf_counter()
    prompts = [sample.tokens for sample in samples]
    prompts += prompts[-1:] * (batch - len(prompts))  # a batch of another size would compile anew
    answers = answer(
        model,
        prompts,
        way,
        capacity=length,
        profile=profile,
        answer_tokens=samples[0].answer_tokens,
        stop=source.stop,
        chunk=chunk,
    )
    seconds = (time.perf_counter() - start) / len(samples)
    lines = [_line(sample, way, source.decode(found), seconds) for sample, found in zip(samples, answers, strict=False)]
    records.add(line for line in lines if tuple(line[name] for name in KEY) not in records)


def _line(sample: Sample, way: Way, said: str, seconds: float) -> dict[str, Any]:
    return {
        "sequence": sample.name,
        "method": way.method,
        "budget": way.budget,
        "layers": "profile",
        "task": sample.task,
        "length": sample.length,
        "tokens": len(sample.tokens),
        "depth": sample.depth,
        "answers": list(sample.answers),
        "said": said,
        "score": sample.score(said, sample.answers),
        "begins": begins(said, sample.answers),
        "seconds": round(seconds, 3),
    }
