"""What scripts share of contestants: of other projects, which may be missing, fail, or be wrong; and comparisons."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from xsake._measure.timing import race

WORST = 0.02  # of the norm of our result: about five times what bfloat16 explains
MOST_CHARACTERS = 400  # of another library's error that a record keeps


def of_torch(*names: str) -> tuple[dict[str, ModuleType], Callable[[Any], Any]]:
    """The modules of `xsake._race.peers` that are installed here, and the function that waits for a contestant's
    result.
    """
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module(f"xsake._race.peers.{name}")
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
    if not found:
        return found, jax.block_until_ready
    return found, importlib.import_module("xsake._race.peers.by_torch").wait


@dataclasses.dataclass(frozen=True)
class Checked:
    """A contestant that was compared with our results. `run` is None where there is nothing to race, and `words` say
    why."""

    run: Callable[[], Any] | None
    words: str | None = None
    differences: dict[str, float] | None = None  # from our results, relative to the norm
    variant: str | None = None

    def recorded(self) -> dict[str, Any]:
        return {
            "raced": self.run is not None,
            "words": self.words,
            "differences": self.differences,
            "variant": self.variant,
        }


def checked(function: Callable[..., Any], given: Sequence[Any], ours: Mapping[str, Any]) -> Checked:
    """Compile and run `function`, and compare its results with `ours`: our results by name, in the same order."""
    try:
        run: Callable[[], Any] = partial(jax.jit(function).lower(*given).compile(), *given)
        found = jax.block_until_ready(run())
    except Exception as error:  # whatever another library raises
        return Checked(None, f"it fails: {told(error)}")
    differences = dict(zip(ours, map(relative_difference, jax.tree.leaves(found), ours.values()), strict=True))
    wrong = {name: d for name, d in differences.items() if not d <= WORST}  # NaN is wrong
    if wrong:
        named = ", ".join(f"{name} by {d:.1e}" for name, d in wrong.items())
        return Checked(None, f"it is wrong: relative to the norm of ours it differs in {named}", differences)
    return Checked(run, None, differences)


def fastest(variants: Mapping[str, Callable[..., Any]], given: Sequence[Any], ours: Mapping[str, Any]) -> Checked:
    """The fastest variant of those that are right; if none is, the first variant, with its words."""
    every = {name: dataclasses.replace(checked(f, given, ours), variant=name) for name, f in variants.items()}
    right = {name: peer.run for name, peer in every.items() if peer.run is not None}
    if not right:
        return next(iter(every.values()))
    if len(right) == 1:
        return every[next(iter(right))]
    times = race(right, rounds=3, min_seconds=0.02)
    return every[min(times, key=lambda name: times[name].median)]


def told(error: Exception) -> str:
    """The kind and the text of an error, on one line, its beginning and its end."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def check_agreement(contestants: Mapping[str, Callable[[], Any]], ours: str, peer: str, where: str) -> None:
    """Raise a ValueError if a peer in torch, where it is raced, has other results than ours."""
    if peer not in contestants:
        return
    own, theirs = (jax.tree.leaves(contestants[who]()) for who in (ours, peer))
    found = [relative_difference(jnp.from_dlpack(x.detach()), y) for x, y in zip(theirs, own, strict=True)]
    if not all(difference <= WORST for difference in found):  # NaN is wrong
        raise ValueError(f"{where}: relative to the norms of our results, those of {peer} differ by {found}")


def relative_difference(found: Any, ours: Any) -> float:
    """The norm of the difference over the norm of `ours`."""
    found, ours = found.astype(jnp.float32), ours.astype(jnp.float32)
    if found.shape != ours.shape:
        return float("inf")
    return float(jnp.linalg.norm(found - ours) / jnp.linalg.norm(ours))


def largest_difference(found: Any, ours: Any) -> float:
    """The largest relative difference of the arrays of two trees."""
    return max(map(relative_difference, jax.tree.leaves(found), jax.tree.leaves(ours)))
