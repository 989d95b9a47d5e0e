"""The cost of a HADS mask, stage by stage, beside the attention that it saves.

    python -m benchmarks.gpu.mask_cost                      32k tokens, 32 query heads on 8, head_dim 128, blocks of 64
    python -m benchmarks.gpu.mask_cost --lengths 4096,8192,16384,32768 --record
    python -m benchmarks.gpu.mask_cost --block 32 --block-q 128    rows of 128 queries, blocks of 32 keys
    python -m benchmarks.gpu.mask_cost --out DIR            write the run to DIR

Contestants take turns. Times of stages are of separate programs, so that their sum is a little above the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import xsake
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show
from xsake._race.contestants import dense, sparse
from xsake.autotune.workloads import Workload
from xsake.hads import BlockMask, HadsProfile, layer_counts, select
from xsake.hads.mask.lists.compact import compact
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import block_mass
from xsake.hads.selection.gpu import choose as gpu_choose
from xsake.hads.selection.gpu import estimate as gpu_estimate
from xsake.hads.selection.pooled import pool
from xsake.hads.selection.rows import Rows
from xsake.hads.study.methods.mask import MethodMask

BUDGETS = (0.1, 0.2, 0.43)

Call = tuple[Callable[..., Any], tuple]  # what is timed: a function and its arguments


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def random_profile(q_heads: int, kv_heads: int, head_dim: int, grid: CausalGrid) -> HadsProfile:
    """One layer with weights of a usual size; a mask's cost does not depend on them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((1, q_heads, *shape))).astype(np.float32)

    even = np.linspace(0.1, 0.9, 9, dtype=np.float32)
    return HadsProfile(
        features=1 + normal(4, head_dim // 2, scale=0.3),
        tokens=1 + normal(scale=0.3),
        distance=normal(len(BUCKETS)),
        sink=normal(),
        sensitivity=np.exp(normal()),
        burstiness=np.abs(normal(scale=0.03)),
        free_shares=even,
        layer_shares=even[:, None],
        head_shares=np.broadcast_to(even[:, None, None], (9, 1, q_heads)).copy(),
        log_thresholds=-np.arange(9, dtype=np.float32),
        model="random",
        block=grid.block,
        block_q=grid.block_q,
        length=4096,
        kv_heads=kv_heads,
        digests=(),
        rule=grid.rule,
    )


@dataclasses.dataclass(frozen=True)
class Bench:
    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block: int
    block_q: int

    def run(self, rounds: int) -> list[Row]:
        sizes = dict(q_heads=self.q_heads, kv_heads=self.kv_heads, length=self.length, head_dim=self.head_dim)
        workload = Workload(name="mask", batch=1, is_causal=True, **sizes)
        query, key, value = workload.inputs(jnp.bfloat16 if on_gpu() else jnp.float32)
        grid = CausalGrid.of(self.length, self.block, self.block_q)
        profile = random_profile(self.q_heads, self.kv_heads, self.head_dim, grid)
        device = jax.tree.map(jnp.asarray, profile)
        calls = self._stages(query, key, device, grid)
        calls["dense"] = dense("cudnn" if on_gpu() else "xla"), (query, key, value)
        for budget in (b for b in BUDGETS if b > grid.forced_blocks / grid.blocks):
            counts = jnp.asarray(layer_counts(profile, budget, self.length), jnp.int32)
            for name, make in MAKERS.items():
                calls[f"mask: {name} at {budget:.0%}"] = make, (query, key, device, counts)
                calls[f"mask and attention: {name} at {budget:.0%}"] = BOTH[name], (query, key, value, device, counts)
            mask = _hads_once(query, key, device, counts)
            calls[f"attention: hads at {budget:.0%}"] = sparse, (query, key, value, mask)
        times = timings(_compiled(calls), rounds)
        return [{"what": name, "seconds": seconds} | dataclasses.asdict(self) for name, seconds in times.items()]

    def _stages(self, query: Array, key: Array, profile: HadsProfile, grid: CausalGrid) -> dict[str, Call]:
        """Each stage of making a mask, on the output of the stage before."""
        count = jnp.int32(round(0.2 * self.q_heads * grid.blocks))

        def estimates(query: Array, key: Array, p: HadsProfile) -> Array:
            if on_gpu():
                return gpu_estimate.block_logits(query, key, p.estimator(0), Rows(grid))
            return block_mass(pool(query, key, grid), p.estimator(0), grid)

        def chooses(estimate: Array, p: HadsProfile) -> tuple[Array, ...]:
            rule = {"sensitivity": p.sensitivity[0], "burstiness": p.burstiness[0], "count": count}
            if on_gpu():
                return gpu_choose.choose(estimate, Rows(grid), **rule).lists(Rows(grid), grid.blocks)
            return compact(choose(estimate, Rows(grid), **rule), grid.full(), grid.blocks)

        estimate = jax.jit(estimates)(query, key, profile)
        return {
            "stage: estimate": (estimates, (query, key, profile)),
            "stage: choose and list": (chooses, (estimate, profile)),
        }


def _hads(query: Array, key: Array, profile: HadsProfile, counts: Array) -> BlockMask:
    return select(query, key, profile, counts, layer=0, transpose=False)


def _rival(name: str) -> Callable[..., BlockMask]:
    return lambda query, key, profile, counts: MethodMask.of(name, profile, counts)(0, query, key)


def _with_attention(make: Callable[..., BlockMask]) -> Callable[..., Array]:
    return lambda query, key, value, profile, counts: xsake.attention(
        query, key, value, make(query, key, profile, counts)
    )


MAKERS = {
    "hads": _hads,
    "mean-pooled top-k": _rival("mean_top_k"),
    "XAttention 8": _rival("x_attention_8"),
    "XAttention 16": _rival("x_attention_16"),
}
BOTH = {name: _with_attention(make) for name, make in MAKERS.items()}
_hads_once = jax.jit(_hads)


def _compiled(calls: dict[str, Call]) -> dict[str, Callable[[], Any]]:
    """The calls as programs, one for each function (budgets differ in numbers alone), compiled side by side."""
    first = {function: args for function, args in reversed(calls.values())}
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda call: jax.jit(call[0]).lower(*call[1]).compile(), first.items())
        programs = dict(zip(first, made, strict=True))
    return {name: partial(programs[function], *args) for name, (function, args) in calls.items()}


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--lengths", type=listed(int), default=[32768])
    options.add_argument("--q-heads", type=int, default=32)
    options.add_argument("--kv-heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--block", type=int, default=64)
    options.add_argument("--block-q", type=int, help="tokens of a row of blocks; by default the block")
    args = options.parse_args()
    rows = Record("hads_mask_cost", args.out)
    for length in args.lengths:
        bench = Bench(length, args.q_heads, args.kv_heads, args.head_dim, args.block, args.block_q or args.block)
        rows.add(*(found := bench.run(args.rounds)))
        seconds = {row["what"]: row["seconds"]["median"] for row in found}
        lines = [[what, f"{x * 1e3:.3f}", f"{x / seconds['dense']:.1%}"] for what, x in seconds.items()]
        show(["", "ms", "of dense"], lines, title=str(bench))


if __name__ == "__main__":
    main()
