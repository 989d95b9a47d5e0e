"""Record the shapes of the calls that a program makes, and read a recording as problems to tune."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xsake._ground import atomic
from xsake._ground.read import read_json, reason
from xsake._op import tuned
from xsake.autotune.problem import Problem
from xsake.autotune.workloads import Workload
from xsake.backend.contract import Call

_VERSION = 1


@contextlib.contextmanager
def record_calls(path: str | os.PathLike) -> Iterator[None]:
    """Record the shapes of all calls of `xsake.attention` inside the `with` block, and write them to `path` at its end.

    A call is recorded when it is traced: calls of a function that was compiled before the block are not recorded.

        with xsake.autotune.record_calls("calls.json"):
            train_step(state, batch)

        $ xsake autotune --calls calls.json
    """
    heard: collections.Counter[tuple] = collections.Counter()

    def listen(name: str, call: Call) -> None:
        heard[tuple(_facts(name, call).items())] += 1

    with tuned.listening(listen):
        yield
    calls = [dict(facts) | {"traced": times} for facts, times in heard.most_common()]
    atomic.write_text(path, json.dumps({"version": _VERSION, "calls": calls}, indent=1) + "\n")


def _facts(name: str, call: Call) -> dict[str, Any]:
    return {
        "implementation": name,
        "dtype": call.query.dtype.name,
        "batch": call.batch,
        "length": call.q_len,
        "kv_length": call.kv_reach,
        "q_heads": call.q_heads,
        "kv_heads": call.kv_heads,
        "head_dim": call.head_dim,
        "value_dim": call.value_dim,
        "block": call.mask.block_q,
        "block_kv": call.mask.block_kv,
        "is_causal": call.band.right == 0,
        "density": call.mask.density_hint,
    }


def read_calls(path: Path) -> list[Problem]:
    """Problems from a recording; calls that differ only in density are one problem."""
    try:
        given = read_json(path)
        if given["version"] != _VERSION:
            raise ValueError(f"its version is {given['version']!r}, and this xsake reads version {_VERSION}")
        found: dict[Problem, list[float | None]] = {}
        for call in given["calls"]:
            problem = _problem(call)
            found.setdefault(dataclasses.replace(problem, densities=()), []).extend(problem.densities)
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else repr(error)
        raise ValueError(f"{path} is no recording of calls that can be tuned: {why}") from error
    return [dataclasses.replace(p, densities=tuple(dict.fromkeys(d))) for p, d in found.items()]


def _problem(call: dict[str, Any]) -> Problem:
    names = ("batch", "length", "kv_length", "q_heads", "kv_heads", "head_dim", "value_dim", "block", "block_kv")
    sizes: dict[str, int] = {name: call[name] for name in names}
    name = f"{sizes['batch']}x{sizes['length']}x{sizes['q_heads']}x{sizes['head_dim']}"
    return Problem(
        workload=Workload(name=name, is_causal=bool(call["is_causal"]), **sizes),
        dtype=str(call["dtype"]),
        densities=(call["density"],),
        implementation=str(call["implementation"]),
    )
