"""Many requests in one array (`xsake.ragged_attention`) beside the same requests one by one, and with HADS.

    python -m benchmarks.gpu.ragged                     prompts, chunks and new tokens of 2048 to 32768 tokens, print
    python -m benchmarks.gpu.ragged --record            also write benchmarks/results/gpu_ragged.json
    python -m benchmarks.gpu.ragged --out DIR           write the run to DIR
    python -m benchmarks.gpu.ragged --cases mix --least 64 --most 128    a small run, anywhere

Heads are Llama 3 8B's, pages hold 64 tokens of keys and values by turns, in random order. HADS's times include the
choice of blocks, by a profile of random weights. The error is that of each request's last queries, against XLA in
float32. `temporary` is what the compiled call needs beside its arguments: a copy of the pool would be in it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import xsake
from benchmarks.gpu.mask_cost import random_profile
from benchmarks.harness.contestants import relative_difference
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake._measure.timing import race
from xsake.hads.attention.policy import ALWAYS
from xsake.hads.attention.ragged import DENSE, attend, counts_of_chunk
from xsake.hads.profile.causal_grid import CausalGrid

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
BUDGETS = (0.2, 0.1)
CHECKED = 16  # queries of each request

Requests = list[tuple[int, int]]  # new tokens, and all tokens, of each request
CASES: dict[str, Callable[[list[int]], Requests]] = {
    "prompts": lambda sizes: [(size, size) for size in sizes],
    "chunks": lambda sizes: [(sizes[0], size) for size in sizes],
    "new tokens": lambda sizes: [(1, size) for size in sizes],
    "mix": lambda sizes: [(1, size) for size in sizes] + [(sizes[0], size) for size in sizes[::8]],
}


class Batch(NamedTuple):
    """The arguments of `xsake.ragged_attention`."""

    query: Array
    pages: Array
    cu_seqlens: Array
    kv_lengths: Array
    page_table: Array

    @classmethod
    def of(cls, requests: Requests) -> Batch:
        new, lengths = zip(*requests, strict=True)
        pages = [-(-length // PAGE) for length in lengths]
        ends = np.cumsum(pages)
        order = np.random.default_rng(0).permutation(ends[-1]).astype(np.int32)
        table = np.full((len(pages), max(pages)), -1, np.int32)
        for row, end, number in zip(table, ends, pages, strict=True):
            row[:number] = order[end - number : end]
        query, cache = (
            jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
            for seed, shape in enumerate([(sum(new), HEADS, DIM), (int(ends[-1]), PAGE, 2 * KV_HEADS, DIM)])
        )
        cu = np.cumsum([0, *new], dtype=np.int32)
        return cls(query, cache, jnp.asarray(cu), jnp.asarray(lengths, jnp.int32), jnp.asarray(table))

    def last(self, number: int) -> tuple[Batch, np.ndarray]:
        """Each request's last queries, at most so many, and where they are."""
        cu = np.asarray(self.cu_seqlens)
        at = [np.arange(max(begin, end - number), end) for begin, end in itertools.pairwise(cu)]
        where, ends = np.concatenate(at), np.cumsum([0, *map(len, at)], dtype=np.int32)
        return self._replace(query=self.query[where], cu_seqlens=jnp.asarray(ends)), where

    def alone(self, request: int) -> Batch:
        begin, end = (int(self.cu_seqlens[request + n]) for n in (0, 1))
        one = slice(request, request + 1)
        numbers = jnp.array([0, end - begin], jnp.int32), self.kv_lengths[one], self.page_table[one]
        return Batch(self.query[begin:end], self.pages, *numbers)


def measure(name: str, requests: Requests, rounds: int) -> Row:
    batch, new_alone = Batch.of(requests), all(new == 1 for new, _ in requests)
    ragged = jax.jit(partial(xsake.ragged_attention, most_queries=1 if new_alone else None))
    every = [batch.alone(request) for request in range(len(requests))]
    contestants: dict[str, Callable[[], Any]] = {
        "ragged": partial(ragged, *batch),
        "one by one": lambda: [ragged(*one) for one in every],
    }
    if not new_alone:
        contestants |= {f"HADS {budget:.0%}": _hads(batch, requests, budget) for budget in BUDGETS}
    checked, where = batch.last(CHECKED)
    wide = checked._replace(query=checked.query.astype(jnp.float32), pages=checked.pages.astype(jnp.float32))
    exact = jax.jit(partial(xsake.ragged_attention, implementation="xla"))(*wide)
    error = relative_difference(jax.block_until_ready(contestants["ragged"]())[where], exact)
    memory = ragged.lower(*batch).compile().memory_analysis()
    for contestant in contestants.values():
        jax.block_until_ready(contestant())
    times = race(contestants, rounds=rounds, min_seconds=0.03)
    return {
        "case": name,
        "requests": requests,
        "error": error,
        "pool_bytes": batch.pages.nbytes,
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
        "seconds": {what: dataclasses.asdict(time) for what, time in times.items()},
    }


def _hads(batch: Batch, requests: Requests, budget: float) -> Callable[[], Any]:
    """Prompts and chunks at this share of their blocks; new tokens are dense."""
    profile = random_profile(HEADS, KV_HEADS, DIM, CausalGrid.of(max(length for _, length in requests), PAGE))

    def kept(new: int, length: int) -> np.ndarray:
        if new == 1:
            return np.full(1, DENSE, np.int32)
        where: dict[str, Any] = dict(start=length - new, end=length, length=length)
        where |= dict(device=jax.local_devices()[0].device_kind, dtype="bfloat16")
        return counts_of_chunk(profile, budget, ALWAYS, **where)

    counts = jnp.asarray(np.stack([kept(*request) for request in requests]))
    program = jax.jit(lambda counts, *given: attend(profile, 0, *given, counts=counts, lengths=given[3]))
    return partial(program, counts, *batch)


def lines_of(row: Row) -> list[list[Any]]:
    base = row["seconds"]["ragged"]["median"]
    return [
        [row["case"], len(row["requests"]), what, *spread(time), f"{time['median'] / base:.2f}", f"{row['error']:.1e}"]
        for what, time in row["seconds"].items()
    ]


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--cases", type=listed(among=CASES), default=[*CASES])
    options.add_argument("--requests", type=listed(int), default=[8, 64])
    options.add_argument("--least", type=int, default=2048, help="tokens of the shortest request")
    options.add_argument("--most", type=int, default=32768, help="tokens of the longest request")
    args = options.parse_args()
    rows = Record("gpu_ragged", args.out)
    for number in args.requests:
        sizes = [int(size) for size in np.geomspace(args.least, args.most, number).round()]
        for name in args.cases:
            if name != "prompts" or number < 64:  # 64 whole prompts are half a million tokens
                rows.add(measure(name, CASES[name](sizes), args.rounds))
    columns = ["case", "requests", "what", "ms", "quartiles", "of ragged", "error"]
    show(columns, [line for row in rows for line in lines_of(row)])


if __name__ == "__main__":
    main()
