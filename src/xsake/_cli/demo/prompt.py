"""How soon a long prompt's first token comes: SmolLM2 reads it densely, and with HADS at a fifth of the blocks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from xsake.hads.profile.profile import HadsProfile

MODEL = "smollm2"
BUDGET = 0.2
LENGTH = 6000


def show(model: Any, encode: Callable[[str], list[int]], console: Console) -> None:
    """Print both times. Compiling is not counted: a model of one layer compiles what all layers run."""
    race(model, page(encode, LENGTH, backwards=True), HadsProfile.shipped(MODEL, LENGTH), BUDGET, console)


def page(encode: Callable[[str], list[int]], length: int, *, backwards: bool = False) -> list[int]:
    """The first tokens of Python's language reference, which comes with Python, or of its topics in reverse order."""
    from pydoc_data.topics import topics

    return encode("\n\n".join(topics[name] for name in sorted(topics, reverse=backwards)))[:length]


def race(model: Any, tokens: list[int], profile: Any, budget: float, console: Console) -> dict[str, float]:
    from xsake.model import HadsBudget
    from xsake.model.generation.prefill import read_prompts

    def seconds(model: Any, hads: HadsBudget | None) -> tuple[float, int]:
        start = time.perf_counter()
        read = read_prompts(model, [tokens], capacity=len(tokens), hads=hads)
        first = int(model.logits(model.norm(read.last)).argmax())
        return time.perf_counter() - start, first

    ways = {"dense": None, f"HADS, {budget:.0%} of the blocks": HadsBudget(profile, budget)}
    times, firsts = {}, {}
    with console.status("reading") as status:
        for name, hads in ways.items():
            status.update(f"compiling: {name}")
            seconds(_first_layer(model), None if hads is None else HadsBudget(_first_of(profile), budget))
            status.update(f"reading: {name}")
            times[name], firsts[name] = seconds(model, hads)
    table = Table("", "time to first token", "", title=f"A prompt of {len(tokens)} tokens")
    dense = times["dense"]
    for name, taken in times.items():
        table.add_row(name, f"{taken:.1f} s", "" if name == "dense" else f"{dense / taken:.1f}x")
    console.print(table)
    same = len(set(firsts.values())) == 1
    console.print(f"The first token is {'the same' if same else 'not the same'}.")
    return times


def _first_layer(model: Any) -> Any:
    """The model without all layers but the first, whose weights it shares."""
    from flax import nnx

    one = nnx.merge(*nnx.split(model))
    one.blocks = nnx.List([one.blocks[0]])
    one.config = dataclasses.replace(model.config, layers=1)
    return one


def _first_of(profile: Any) -> Any:
    """The profile of the first layer alone."""
    tables = {"layer_shares": profile.layer_shares[:, :1], "head_shares": profile.head_shares[:, :1]}
    names = ("features", "tokens", "distance", "sink", "sensitivity", "burstiness")
    return dataclasses.replace(profile, **{name: np.asarray(getattr(profile, name))[:1] for name in names}, **tables)
