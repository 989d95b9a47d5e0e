"""One problem on the device: its data and masks, its programs, their races, and whether their results are right."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.buckets import power_of_two_at_least
from xsake._measure import verify
from xsake._measure.closeness import Correctness, Yardstick
from xsake._measure.interference import Contention, contention
from xsake._measure.timing import default_pause, in_turns, seconds_per_call
from xsake._op import registry, tuned
from xsake._op.arguments import build_call
from xsake.autotune.measure.lowering import Lowering
from xsake.autotune.measure.program import Program
from xsake.autotune.problem import Part, Problem, StudyPlan, label
from xsake.backend.contract import RESULTS, Call
from xsake.hads.mask.block_mask import BlockMask
from xsake.tuning_db import UNKNOWN_DENSITY

COMPILERS = max(1, (os.cpu_count() or 1) - 2)  # configurations compiled at the same time
# Below this, dense attention takes an accelerator no longer than Python needs to launch a call: chain the calls.
SHORT_FLOPS = 2e12


@dataclasses.dataclass(frozen=True)
class Round:
    """Seconds per call of each contestant in one round of a race, and the contention while they ran."""

    seconds: list[float]
    contended: Contention = dataclasses.field(default_factory=Contention)


def _once[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """The method, run once for equal arguments; configurations are known by their label."""

    @functools.wraps(method)
    def found(self: Any, *arguments: Any) -> Any:
        key = (method.__name__, *(label(a) if isinstance(a, dict) else a for a in arguments))
        if key not in self._made:
            self._made[key] = method(self, *arguments)  # type: ignore[call-arg]
        return self._made[key]

    return found  # type: ignore[return-value]


class Contest:
    """Compiles, races and verifies the directions of one problem, one by one.

    All densities run the same compiled program: every mask has capacity for all blocks, and no density hint.
    Without `lowering`, this process lowers all programs.
    """

    def __init__(self, problem: Problem, round_seconds: float, lowering: Lowering | None = None) -> None:
        self._round_seconds, self._lowering = round_seconds, lowering
        self._pause, self._order = default_pause(), random.Random(0)
        workload = problem.workload
        self._inputs = workload.inputs(problem.dtype)
        short = jax.default_backend() != "cpu" and workload.flops() < SHORT_FLOPS
        self._chained = 8 if short else 1
        shape = (*self._inputs[0].shape[:3], self._inputs[2].shape[3])
        self._d_out = jax.random.normal(jax.random.key(9), shape, jnp.float32).astype(problem.dtype)
        room = BlockMask.full(
            workload.length,
            workload.kv_length or workload.length,
            block_q=workload.block,
            block_kv=workload.block_kv or workload.block,
            is_causal=workload.is_causal,
            transpose=False,
        ).capacity
        with ThreadPoolExecutor() as pool:  # a mask of a long sequence takes seconds
            masks = pool.map(
                lambda d: workload.mask(UNKNOWN_DENSITY if d is None else d, capacity=room), problem.densities
            )
            self.masks = dict(zip(problem.densities, masks, strict=True))
        natural = {d: self._call(_trimmed(self.masks[d], known=d is not None)) for d in problem.densities}
        first = natural[problem.densities[0]]
        names = registry.candidates(problem.implementation, jax.default_backend())
        self._name = registry.choose(names, first)
        self._backend = registry.get(self._name)
        self._config = self._backend.default_config(first)
        self._calls = {d: self._call(_bare(mask)) for d, mask in self.masks.items()}
        self._programs: dict[tuple[str, str], Callable] = {}
        self._made: dict[tuple, Any] = {}  # results of the methods that are called `_once`
        self._heuristic: dict[tuple, dict[str, Array]] = {}
        self._defaults: dict[tuple, Part] = {}
        self.plans = self._plans(natural)

    def _call(self, mask: BlockMask) -> Call:
        return build_call(*self._inputs, mask, default_blocks=(mask.block_q, mask.block_kv))

    def _plans(self, natural: dict[Any, Call]) -> list[StudyPlan]:
        """One plan per direction and density bucket."""
        plans = []
        for direction in tuned.directions(self._backend):
            buckets: dict[Any, list] = {}
            for density, call in natural.items():
                buckets.setdefault(tuned.key_of(self._name, call, direction), []).append(density)
            for key, densities in buckets.items():
                call = natural[densities[0]]
                parts = list(dict.fromkeys(getattr(c, direction) for c in self._backend.search_space(call)))
                if len(parts) == 1:
                    continue  # nothing to choose, or the direction's kernel does not run in such calls
                default = dataclasses.asdict(getattr(self._backend.default_config(call), direction))
                self._defaults |= {(direction, d): default for d in densities}
                plans.append(
                    StudyPlan(
                        key=key,
                        densities=tuple(densities),
                        true_densities=tuple(float(self.masks[d].density()) for d in densities),
                        default=default,
                        parts=tuple(dataclasses.asdict(part) for part in parts),
                        kernel=tuned.kernel_hash(self._name),
                    )
                )
        return plans

    # -- compiling -------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before anything is timed, compute the oracle's results while the heuristic's forward compiles.

        On a CPU the two would only slow each other down: there the oracle runs when the first result is checked.
        """
        checked = dict.fromkeys(plan.densities[0] for plan in self.plans if jax.default_backend() != "cpu")
        with ThreadPoolExecutor(1) as pool:
            oracle = pool.submit(lambda: [self._yardsticks_of(density) for density in checked])
            self.compile("forward", [dataclasses.asdict(self._config.forward)])
            oracle.result()

    def compile(self, direction: str, parts: Sequence[Part]) -> list[str | None]:
        """Compile the parts in parallel, before they are timed. Returns an error or None per part."""
        lowering = self._lowering if len(parts) > 1 else None  # a child would take as long for one part alone

        def attempt(part: Part) -> str | None:
            try:
                self._program(direction, part, lowering)
            except Exception as error:  # any error of a compiler is a failure of this configuration only
                return f"{type(error).__name__}: {error}"
            return None

        if direction != "forward":
            for density in self._calls:
                self._statistics_of(density)
        with ThreadPoolExecutor(COMPILERS) as pool:
            return list(pool.map(attempt, parts))

    def _program(self, direction: str, part: Part, lowering: Lowering | None = None) -> Callable:
        key = (direction, label(part))
        if key not in self._programs:
            config = dataclasses.replace(self._config, **{direction: tuned.make_part(self._backend, direction, part)})
            if hasattr(config, "running"):
                config = config.running(direction)
            program = Program(implementation=self._name, direction=direction, config=config, calls=self._chained)
            arguments = self._arguments(direction, next(iter(self._calls)))
            self._programs[key] = _lowered(program, arguments, lowering).compile()
        return self._programs[key]

    def _arguments(self, direction: str, density: Any) -> tuple:
        call = self._calls[density]
        return (call,) if direction == "forward" else (call, *self._statistics_of(density), self._d_out)

    @_once
    def _statistics_of(self, density: Any) -> tuple[Array, Array]:
        """(lse, delta) from the forward with the heuristic's configuration."""
        out, lse = self._program("forward", dataclasses.asdict(self._config.forward))(self._calls[density])
        return lse, jnp.einsum("bthd,bthd->bht", out, self._d_out, preferred_element_type=jnp.float32)

    # -- racing ----------------------------------------------------------------------------------------------------

    def race(self, direction: str, density: float | None, parts: Sequence[Part]) -> Round:
        """One round. Contestants run one after the other, in random order and after equal pauses."""
        runs = [self._runner(direction, density, part) for part in parts]
        calls = self._repeats_of(direction, density)

        def turn(i: int) -> float:
            return seconds_per_call(runs[i], calls) / self._chained

        with contention() as contended:
            found = in_turns(range(len(runs)), turn, rounds=1, pause=self._pause, order=self._order)
        return Round([seconds for (seconds,) in found.values()], contended)

    def _runner(self, direction: str, density: Any, part: Part) -> Callable[[], Any]:
        self._warm_up(direction, density, part)
        program, arguments = self._program(direction, part), self._arguments(direction, density)
        return lambda: program(*arguments)

    @_once
    def _warm_up(self, direction: str, density: Any, part: Part) -> None:
        jax.block_until_ready(self._program(direction, part)(*self._arguments(direction, density)))

    @_once
    def _repeats_of(self, direction: str, density: Any) -> int:
        """Calls per contestant and round: equal for all, so many that the heuristic takes about `round_seconds`."""
        run = self._runner(direction, density, self._defaults[direction, density])
        return max(1, round(self._round_seconds / seconds_per_call(run, 1)))

    # -- checking --------------------------------------------------------------------------------------------------

    @_once
    def verify(self, direction: str, density: float | None, part: Part) -> Correctness:
        """Compare the last group of heads with the oracle, and all heads with the heuristic's results."""
        results, yardsticks = self._results(direction, density, part), self._yardsticks_of(density)
        found = Correctness.of({n: x[-1:, :, -yardsticks[n].exact.shape[2] :] for n, x in results.items()}, yardsticks)
        problems = [found.problem] if found.problem is not None else []
        for name, actual in results.items():
            heuristic = self._heuristic_results(direction, density)[name]
            apart = float(jnp.abs(actual.astype(jnp.float32) - heuristic.astype(jnp.float32)).max())
            if not apart <= 2 * yardsticks[name].allowed_max:
                problems.append(f"{name}: differs from the heuristic's result by up to {apart:.3g} in some head")
        return Correctness(found.errors, "; ".join(problems) or None)

    def _results(self, direction: str, density: Any, part: Part) -> dict[str, Array]:
        results = self._program(direction, part)(*self._arguments(direction, density))
        results = dict(zip(RESULTS[direction], results, strict=True))
        if "lse" in results:
            results["lse"] = results["lse"].swapaxes(1, 2)
        return results

    def _heuristic_results(self, direction: str, density: Any) -> dict[str, Array]:
        key = (direction, density)
        if key not in self._heuristic:  # keep only the latest results: they are large
            self._heuristic = {key: self._results(direction, density, self._defaults[key])}
        return self._heuristic[key]

    @_once
    def _yardsticks_of(self, density: Any) -> dict[str, Yardstick]:
        return verify.yardsticks(*self._inputs, self._d_out, self.masks[density])


def _lowered(program: Program, arguments: tuple, lowering: Lowering | None) -> jax.stages.Lowered:
    if lowering is not None:
        # Not every program can be exported, and a child may die or hang. Errors of the program itself come again below.
        with contextlib.suppress(Exception):
            return lowering.lower(program, arguments)
    return program.function().lower(*arguments)


def _bare(mask: BlockMask) -> BlockMask:
    return dataclasses.replace(mask, density_hint=None)


def _trimmed(mask: BlockMask, *, known: bool) -> BlockMask:
    """The mask as a user builds it: the capacity is a power of two, and `known` masks have a density hint."""
    need = int(np.asarray(mask.kv_row_ptr)[..., -1].max())
    room = min(power_of_two_at_least(need), mask.capacity)
    lists = {name: getattr(mask, name)[..., :room] for name in ("kv_indices", "q_indices")}
    return dataclasses.replace(mask, **lists, density_hint=mask.density_hint if known else None)
