"""Throughputs of recorded runs, from `rates.json`, which `python -m benchmarks.plan_rates` makes of the records."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("rates.json")
FORWARD, BOTH = "forward", "forward+backward"
BOTH_FLOPS = 3.5  # operations of forward and backward together, over operations of the forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """The throughput of one recorded call.

    Args:
      device: its kind.
      record: the file in benchmarks/results.
      call: the record's name for the call.
      direction: FORWARD or BOTH.
      keys: tokens in the call's sequences.
      head_dim: of the call.
      block: tokens per mask block.
      blocks_per_row: active blocks per row of query blocks, on average; None where the throughput holds for any number.
      tflops: 1e12 operations on active blocks per second.
    """

    device: str
    record: str
    call: str
    direction: str
    keys: int
    head_dim: int
    block: int
    blocks_per_row: float | None
    tflops: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rest:
    """A recorded training step without its attention: all other work, as matrix products per second.

    Args:
      device: its kind.
      record: the file in benchmarks/results.
      model: the preset that was trained.
      width: of the model.
      attention: dense (by cuDNN) or sparse (a pattern).
      density: of the sparse pattern's mask.
      length: tokens per sequence.
      batch: sequences per step.
      seconds: of the step, recorded.
      attention_seconds: of it, by the throughputs of recorded kernels.
      tflops: the other matrix products over the other seconds, in 1e12 operations per second.
    """

    device: str
    record: str
    model: str
    width: int
    attention: str
    density: float
    length: int
    batch: int
    seconds: float
    attention_seconds: float
    tflops: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A recorded prompt that HADS read, by a whole model or by some of its layers.

    Args:
      device: its kind.
      record: the file in benchmarks/results.
      model: its name.
      width, layers, q_heads: of what was run.
      density: the budget.
      length: tokens.
      seconds: to the first token.
      attention_seconds, choice_seconds: of one layer's attention, and of its choice of blocks, recorded kernels.
      tflops: the other matrix products over the other seconds, in 1e12 operations per second.
    """

    device: str
    record: str
    model: str
    width: int
    layers: int
    q_heads: int
    density: float
    length: int
    seconds: float
    attention_seconds: float
    choice_seconds: float
    tflops: float


@dataclasses.dataclass(frozen=True)
class Rate:
    tflops: float
    source: str


@cache
def shipped() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@cache
def shipped_points() -> tuple[Point, ...]:
    return tuple(Point(**values) for values in shipped()["attention"])


@cache
def shipped_rest() -> tuple[Rest, ...]:
    return tuple(Rest(**values) for values in shipped()["rest_of_step"])


@cache
def shipped_prompts() -> tuple[Prompt, ...]:
    return tuple(Prompt(**values) for values in shipped()["prompts"])


def recorded_blocks(points: Sequence[Point], device: str) -> list[int]:
    """Sizes of mask blocks for which both directions are recorded."""
    sizes = {p.block for p in points if p.device == device}
    return sorted(
        size
        for size in sizes
        if {p.direction for p in points if (p.device, p.block) == (device, size)} == {FORWARD, BOTH}
    )


def attention_rate(
    points: Sequence[Point], *, device: str, direction: str, keys: int, head_dim: int, block: int, blocks_per_row: float
) -> Rate:
    """The throughput of a recorded call: of the nearest head_dim, with this number of blocks in its range, and of
    those the nearest in length.

    Throughput depends on how many blocks a row of queries walks, which is density times length. Between two recorded
    numbers it is interpolated, over the logarithm of the number. Above all recorded numbers every further block takes
    as long as a block between the two largest: a row has fixed costs, which weigh less and less. Below all of them the
    time is taken not to shrink any more, so that the throughput falls with the number of blocks.
    """
    near = [p for p in points if (p.device, p.direction, p.block) == (device, direction, block)]
    if not near:
        known = recorded_blocks(points, device)
        raise ValueError(f"no {direction} of mask blocks of {block} is recorded on {device}; recorded are {known}")
    closest = min((p.head_dim for p in near), key=lambda size: (abs(math.log(size / head_dim)), size))
    calls: dict[str, list[Point]] = {}
    for point in near:
        if point.head_dim == closest:
            calls.setdefault(point.call, []).append(point)
    return _along(_call_for(list(calls.values()), keys, blocks_per_row), blocks_per_row)


def _call_for(calls: list[list[Point]], keys: int, blocks_per_row: float) -> list[Point]:
    """The nearest in length of the calls that walk as few and as many blocks; or that walk as few; or the fewest."""
    if calls[0][0].blocks_per_row is None:
        return min(calls, key=lambda call: abs(math.log(call[0].keys / keys)))
    few = [call for call in calls if _walked(call)[0] <= blocks_per_row]
    both = [call for call in few if blocks_per_row <= _walked(call)[-1]]
    if not few:
        return min(calls, key=lambda call: _walked(call)[0])
    return min(both or few, key=lambda call: (abs(math.log(call[0].keys / keys)), call[0].keys))


def _walked(call: list[Point]) -> list[float]:
    return sorted(p.blocks_per_row for p in call if p.blocks_per_row is not None)


def _along(call: list[Point], blocks_per_row: float) -> Rate:
    """The throughput of one recorded call at this number of blocks."""

    def rate(tflops: float, where: str, *used: Point) -> Rate:
        records = " and ".join(dict.fromkeys(f"{point.record}.json" for point in used))
        return Rate(tflops, f"{records}, {used[0].call}, {used[0].direction}, {where}")

    if call[0].blocks_per_row is None:
        return rate(call[0].tflops, "at any density", call[0])
    curve = sorted(((p.blocks_per_row, p) for p in call if p.blocks_per_row is not None), key=lambda pair: pair[0])
    (least, first), (most, last) = curve[0], curve[-1]
    here = f"{blocks_per_row:.1f} blocks per row"
    if blocks_per_row < least:
        where = f"{here}: below the record's {least:.1f}, whose time is kept"
        return rate(first.tflops * blocks_per_row / least, where, first)
    if blocks_per_row >= most:
        where = f"{here}: the record's {most:.1f} or beyond, where a further block takes as long as one of the last"
        return rate(_beyond(curve, blocks_per_row), where, last, *(p for _, p in curve[-2:-1]))
    (low, before), (high, after) = next(
        pair for pair in itertools.pairwise(curve) if pair[0][0] <= blocks_per_row <= pair[1][0]
    )
    share = math.log(blocks_per_row / low) / math.log(high / low)
    where = f"{here}: between the record's {low:.1f} and {high:.1f}"
    return rate(before.tflops + share * (after.tflops - before.tflops), where, before, after)


def _beyond(curve: list[tuple[float, Point]], blocks_per_row: float) -> float:
    """The throughput of longer rows than are recorded; the last, where no time between two rows is known."""
    most, last = curve[-1]
    before, point = curve[-2] if len(curve) > 1 else curve[-1]
    time, more = most / last.tflops, most / last.tflops - before / point.tflops
    if more <= 0:
        return last.tflops
    return blocks_per_row / (time + more / (most - before) * (blocks_per_row - most))


def choice_seconds(prompts: Sequence[Prompt], *, device: str, tokens: int, q_heads: int) -> float:
    """How long HADS chooses blocks in a layer of one prompt: by pairs of tokens, as recorded on this device.

    Blocks of more keys, which longer prompts than the recorded ones may have, take less time.
    """
    found = [p.choice_seconds / p.q_heads / p.length**2 for p in prompts if p.device == device]
    if not found:
        known = ", ".join(sorted({p.device for p in prompts}))
        raise ValueError(f"hads=True: no choice of blocks is recorded on {device}; recorded is {known}")
    return statistics.median(found) * q_heads * tokens**2


def rest_rate(rest: Sequence[Rest] | Sequence[Prompt], *, width: int) -> Rate:
    """The median throughput of the other matrix products over the recorded runs of the model nearest in width."""
    closest = min((r.width for r in rest), key=lambda size: (abs(math.log(size / width)), size))
    near = [r for r in rest if r.width == closest]
    middle = statistics.median(r.tflops for r in near)
    low, high = min(r.tflops for r in near), max(r.tflops for r in near)
    source = (
        f"{near[0].record}.json, the {'steps' if isinstance(near[0], Rest) else 'prompts'} of {near[0].model} (width "
        f"{closest}) without their attention: median of {len(near)}, from {low:.0f} to {high:.0f}"
    )
    return Rate(middle, source)
