"""Way: how a prompt is read before its answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.ruler.masked_prefill import read_masked
from benchmarks.ruler.prompt_layer import program_of
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.methods.shipped import expand
from xsake.model import HadsBudget
from xsake.model.generation.generation import write
from xsake.model.generation.prefill import Prompt, read_prompts
from xsake.model.generation.sampling import Sampler


class Way(NamedTuple):
    """A method at a budget; the budget of "dense" is 1."""

    method: str
    budget: float

    def __str__(self) -> str:
        return self.method if self.method == "dense" else f"{self.method} {self.budget:.0%}"


def ways_of(methods: str, budgets: str) -> list[Way]:
    """Dense first, then budget by budget. ValueError for methods and budgets that there are not."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    others = [name for name in names if name != "dense"]
    others = expand(",".join(others)) if others else []
    for name in others:
        if name != "hads":
            program_of(name)
    shares = [float(share) for share in budgets.split(",")]
    if wrong := [share for share in shares if not 0 < share <= 1]:
        raise ValueError(f"budgets {wrong} must be shares of the blocks, above 0 and at most 1")
    return [Way("dense", 1.0)] * ("dense" in names) + [Way(name, share) for share in shares for name in others]


def read(
    model: Any,
    prompts: Sequence[Sequence[int]],
    way: Way,
    *,
    capacity: int,
    profile: HadsProfile | None,
    chunk: int | None,
) -> Prompt:
    """The prompts in a cache of `capacity` tokens, to which they are padded. Only "dense" needs no profile."""
    if way.method == "dense":
        return read_prompts(model, prompts, capacity=capacity, chunk=chunk, pad_to=capacity)
    if profile is None:
        raise ValueError(f"{way} needs a profile of the model")
    if way.method == "hads":
        hads = HadsBudget(profile, way.budget, policy="always")
        return read_prompts(model, prompts, capacity=capacity, hads=hads, chunk=chunk, pad_to=capacity)
    return read_masked(model, prompts, capacity=capacity, method=way.method, budget=way.budget, profile=profile)


def answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    way: Way,
    *,
    capacity: int,
    profile: HadsProfile | None,
    answer_tokens: int,
    stop: frozenset[int],
    chunk: int | None = None,
) -> list[list[int]]:
    """The tokens of each prompt's answer, without a stop token: greedy, with dense attention to all tokens before."""
    prompt = read(model, prompts, way, capacity=capacity, profile=profile, chunk=chunk)
    answers: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for tokens in write(
        model, prompt, [jax.random.key(0)] * answer_tokens, Sampler()
    ):  # a greedy sampler draws nothing
        for n, token in enumerate(tokens.tolist()):
            done[n] = done[n] or token in stop
            if not done[n]:
                answers[n].append(token)
        if all(done):
            break
    return answers
