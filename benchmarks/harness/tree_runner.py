"""One checkout's process in `compare_trees.py`: compiles the calls, then runs them when it is asked to.

It writes a line of JSON about all calls when they are compiled, and then a line for each line that it reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import xsake
from benchmarks.harness.checkouts import of_this_checkout
from benchmarks.harness.masks import CALLS, masks_of

# The other checkout may be from before these, or have them elsewhere. The course imports `chain`.
_timing, _, _course = (
    of_this_checkout(f"src/xsake/{name}.py") for name in ("_measure/timing", "_measure/chain", "_race/course")
)
seconds_per_call = _timing.seconds_per_call
FORWARD, Course, compile_all = _course.FORWARD, _course.Course, _course.compile_all
SAMPLE = 2000  # numbers of each result


def described(x: Array) -> dict[str, Any]:
    """A number that depends on every bit of an array, and some of its elements."""
    words = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, words).astype(jnp.uint32).reshape(-1)
    weights = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
    sample = x.reshape(-1)[:: max(1, x.size // SAMPLE)].astype(jnp.float32)
    return {"bits": int((bits * weights).sum(dtype=jnp.uint32)), "sample": sample.tolist()}


def calls_of(asked: dict[str, Any]) -> list[tuple[dict[str, Any], Callable[[], Any], int]]:
    """(its names, a program, how many calls one run of the program makes) of every call that is raced."""
    found = []
    for workload in (CALLS[name] for name in asked["only"]):
        if asked["length"]:
            workload = dataclasses.replace(workload, length=asked["length"])
        masks = {n: m for n, m in masks_of(workload).items() if n.startswith(tuple(asked["masks"].split(",")))}
        for course in (Course(workload, direction) for direction in asked["directions"]):
            options = {"deterministic": False} if asked["any_order"] and course.direction != FORWARD else {}
            for name, mask in masks.items():
                names = {"workload": workload.name, "direction": course.direction, "mask": name}
                found.append((names, course.contestant(partial(xsake.attention, **options), mask), course.calls))
    return found


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    calls = calls_of(json.loads(sys.argv[1]))
    results = [[described(x) for x in jax.tree.leaves(one)] for one in compile_all(run for _, run, _ in calls)]
    about = [
        {**names, "results": result, "once": seconds_per_call(run, 2)}
        for (names, run, _), result in zip(calls, results, strict=True)
    ]
    answer({"xsake": xsake.__file__, "calls": about})
    for line in sys.stdin:
        asked = json.loads(line)
        _, run, chained = calls[asked["call"]]
        jax.block_until_ready(run())  # the caches hold the other checkout's data
        answer({"seconds_per_call": seconds_per_call(run, asked["repeats"]) / chained})


if __name__ == "__main__":
    main()
