"""One call of HADS on the device: sparse and dense attention in paired rounds."""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._measure import environment
from xsake._measure.interference import ATTEMPTS, Contention, calm_first, contention, disturbance
from xsake._measure.isolation import Caller, Service
from xsake._measure.ratio import Ratio
from xsake._measure.timing import Timing, default_pause, in_turns, seconds_per_call
from xsake._op import registry, tuned
from xsake.autotune.hads.calls import HadsCall
from xsake.autotune.measure.contest import Round
from xsake.autotune.result import Measured, of_race
from xsake.hads import Attention, PooledKeys
from xsake.hads.attention.code import code_hash
from xsake.hads.attention.policy import ALWAYS, NEVER, Policy, race_key
from xsake.tuning_db import Entry

CLEAR = 1.5  # sparse and dense attention differ in their work: a busy machine does not turn such a ratio around
_POLICIES = (NEVER, ALWAYS)  # dense attention first, as the heuristic is in the tuner's races


class HadsService(Service):
    """Holds one call at a time: `open` it, then race its two programs."""

    def __init__(self) -> None:
        self._runs: list[Callable[[], Any]] = []
        self._repeats, self._pause, self._order = 1, default_pause(), random.Random(0)
        self._round_seconds = 0.1 if jax.default_backend() == "cpu" else 0.02

    def open(self, call: HadsCall) -> str:
        """Compile the two programs; the name of the implementation that serves the call."""
        self._runs = []
        arrays = inputs(call)
        heard: list[str] = []
        with tuned.listening(lambda name, _: heard.append(name)):
            for policy in _POLICIES:
                program = jax.jit(program_of(call, policy)).lower(*arrays).compile()
                self._runs.append(lambda program=program: program(*arrays))  # type: ignore[misc]
        for run in self._runs:
            jax.block_until_ready(run())
        self._repeats = max(1, round(self._round_seconds / seconds_per_call(self._runs[0], 1)))
        return heard[-1] if heard else registry.candidates(None, jax.default_backend())[0]

    def race(self) -> Round:
        def turn(i: int) -> float:
            return seconds_per_call(self._runs[i], self._repeats)

        with contention() as contended:
            found = in_turns(range(len(self._runs)), turn, rounds=1, pause=self._pause, order=self._order)
        return Round([found[i][0] for i in range(len(self._runs))], contended)


def inputs(call: HadsCall) -> tuple[Array, ...]:
    """(query, key, value, lengths, the keys pooled before this call)."""
    profile, rng = call.profile, np.random.default_rng(0)

    def normal(tokens: int, heads: int) -> Array:
        return jnp.asarray(rng.standard_normal((call.batch, tokens, heads, profile.head_dim), np.float32), call.dtype)

    query = normal(call.queries, profile.q_heads)
    key, value = (normal(call.keys, profile.kv_heads) for _ in range(2))
    lengths = jnp.full(call.batch, call.keys, jnp.int32)
    blocks = -(-call.keys // profile.block)
    pooled = PooledKeys.empty(batch=call.batch, kv_heads=profile.kv_heads, blocks=blocks, head_dim=profile.head_dim)
    return query, key, value, lengths, pooled.write(key, lengths, start=0, block=profile.block).features


def program_of(call: HadsCall, policy: Policy) -> Callable[..., Any]:
    """Attention of a layer. In a cache the pooled keys are kept, as a model keeps them: a call pools its own tokens."""
    profile = call.profile
    attention = Attention(profile, call.budget, decode=call.budget, policy=policy)
    layers = [layer for layer in range(profile.model_layers) if profile.row(layer) is not None]
    layer, start = layers[len(layers) // 2], call.keys - call.queries

    def prompt(query: Array, key: Array, value: Array, lengths: Array, features: Array) -> Any:
        return attention(query, key, value, layer=layer)

    def training(query: Array, key: Array, value: Array, lengths: Array, features: Array) -> Any:
        def loss(*qkv: Array) -> Array:
            return jnp.square(attention(*qkv, layer=layer).astype(jnp.float32)).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    def chunk(query: Array, key: Array, value: Array, lengths: Array, features: Array) -> Any:
        pooled = PooledKeys(features)
        if policy is ALWAYS:
            pooled = pooled.write(key[:, start:], lengths, start=start, block=profile.block)
        return attention(query, key, value, layer=layer, start=start, pooled=pooled)

    def decode(query: Array, key: Array, value: Array, lengths: Array, features: Array) -> Any:
        pooled = PooledKeys(features)
        if policy is ALWAYS:
            pooled = pooled.write_last(key, lengths, block=profile.block, tokens=1)
        return attention(query, key, value, layer=layer, lengths=lengths, pooled=pooled)

    return {"prompt": prompt, "training": training, "chunk": chunk, "decode": decode}[call.kind]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A race's gain of sparse over dense attention, and its entry; None, and why, where the machine was busy."""

    call: HadsCall
    gain: Ratio
    entry: Entry | None
    busy: str | None


def decided(call: HadsCall, worker: Caller, facts: environment.Facts, *, rounds: int, limit: float) -> Outcome:
    """Race the call. Sparse attention wins only if its gain is shown beyond the rounds' spread. Raises `Failed`.

    A busy round is raced again, and so is a race on a busy machine, `ATTEMPTS` times at most; there only a ratio of at
    least `CLEAR`, over the whole interval, decides. The entry says how long threads waited for a core.
    """
    conditions = environment.conditions(facts.gpu)
    implementation = worker.call("open", call, limit=4 * limit)
    for _ in range(ATTEMPTS):
        raced = calm_first(lambda: worker.call("race", limit=limit), lambda one: one.contended.is_high, rounds)
        times = {name: Timing.of([one.seconds[i] for one in raced]) for i, name in enumerate(("dense", "sparse"))}
        contended = sum((one.contended for one in raced), Contention())
        gain = Ratio.of([one.seconds[0] / one.seconds[1] for one in raced])
        busy = disturbance(times, contended)
        if busy is None or gain.low > CLEAR or gain.high < 1 / CLEAR:
            break
    else:
        return Outcome(call, gain, None, busy)
    sizes: dict[str, Any] = dict(batch=call.batch, q_len=call.queries, kv_len=call.keys, density=call.budget)
    key = race_key(call.profile, call.kind, **sizes, dtype=call.dtype, implementation=implementation)
    measured = [
        Measured(
            workload=str(call),
            asked=call.budget,
            density=call.budget,
            default=times["dense"],
            tuned=times["sparse"],
            gain=gain,
        )
    ]
    about = {
        "source": "measured",
        "kernel": code_hash(implementation),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **of_race(gain, measured, contended.share),
        "environment": facts.environment_id,
        "conditions": conditions,
    }
    return Outcome(call, gain, Entry(key, {"sparse": gain.low > 1}, about), None)
