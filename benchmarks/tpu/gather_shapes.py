"""Two ways to gather short blocks into wide tiles on a TPU, by the cycles of the compiler's schedules.

    python -m benchmarks.tpu.gather_shapes              compile, measure and print
    python -m benchmarks.tpu.gather_shapes --record     also write benchmarks/results/tpu_gather_shapes.json
    XSAKE_TPU_PYTHON=python ...                         compile with another interpreter, one that has libtpu

  walk    kernels_pallas_tpu: a grid step owns a row of the mask, and walks the row's list by transfers of its own
  specs   below: a grid step is a chunk of list entries. Each entry is an operand whose BlockSpec looks the block up in
          lists that were prefetched into SMEM; Pallas makes the transfers. Forward only, causal, no options.

Both compute the same tiles by the same formulas. For `specs`, cycles are of the whole grid step, whose schedule
contains Pallas' pipeline; for `walk`, of the loop around a chunk, and once per row of the rest of a step. Neither
counts the about 140 cycles that a grid step costs by itself; `whole` does, for causal masks like HADS's with heads from
10% to 90%.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

import numpy as np

from benchmarks.tpu.schedule import (
    GRID_STEP,
    TILE,
    bundles_of,
    cycles,
    dump_of,
    dumped,
    masks_like_hads,
    measure,
    read_schedule,
)

TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
OWN = {128: 128, 512: 512}  # queries per grid step, as in `walk`: one row of the mask
CHUNKS = {128: (4, 8, 16), 512: (1, 2)}  # entries per chunk
LENGTHS = (4096, 32768)
DELAY = 4  # bundles after a jump that are still executed


def chunks_of(blocks: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """What the grid walks: each chunk's head and row, its number of entries, whether it ends a row, and its list."""
    heads, rows, sizes, ends, lists = [], [], [], [], []
    for (head, row), active in zip(np.ndindex(blocks.shape[:2]), blocks.reshape(-1, blocks.shape[2]), strict=True):
        entries = np.flatnonzero(active)
        for first in range(0, max(1, len(entries)), count):
            part = entries[first : first + count]
            heads.append(head)
            rows.append(row)
            sizes.append(len(part))
            ends.append((first == 0) + 2 * (first + count >= len(entries)))
            last = part[-1] if len(part) else 0
            lists += [*part, *[last] * (count - len(part))]
    given = {"head": heads, "row": rows, "size": sizes, "end": ends, "list": lists}
    return {name: np.asarray(x, np.int32) for name, x in given.items()}


def by_specs(
    chunks: dict[str, Any], query: Any, pairs: Any, *, count: int, tested: bool, interpret: Any = False
) -> Any:
    """query: [H, rows, own, D]; pairs: [H, columns, 2, block, D], K and V of a block. Output and lse of causal rows."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from xsake.kernels_pallas_tpu.tile.element import LOG2E, NEG_INF, NEVER, dot, spread
    from xsake.kernels_pallas_tpu.tile.tiles import LANES

    own, dim, block = *query.shape[2:], pairs.shape[3]
    scale, exact = dim**-0.5 * LOG2E, query.dtype == jnp.float32
    at_once = min(count * block, 512 if own >= 512 else 2048)  # as Tiling.compute of the walk's default
    names = ("head", "row", "size", "end", "list")

    def kernel(*refs: Any) -> None:
        (_, row, size, end, entries), q, gathered = refs[:5], refs[5], refs[6 : 6 + count]
        out, lse, peak, total, acc = refs[6 + count :]
        c = pl.program_id(0)

        @pl.when(end[c] & 1 == 1)
        def _() -> None:
            peak[...] = jnp.full_like(peak, NEG_INF)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

        def tokens(which: int, first: int) -> Any:
            parts = [g[0, 0, which] for g in gathered[first // block : (first + at_once) // block]]
            return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

        within = lax.broadcasted_iota(jnp.int32, (1, block), 1)
        for first in range(0, count * block, at_once):
            x = dot(q[0, 0], tokens(0, first), (1, 1), exact) * scale
            if tested:
                kv = [
                    jnp.where(e < size[c], entries[c * count + e] * block + within, NEVER)
                    for e in range(first // block, (first + at_once) // block)
                ]
                i = row[c] * own + lax.broadcasted_iota(jnp.int32, (own, 1), 0)
                x = jnp.where((jnp.concatenate(kv, 1) if len(kv) > 1 else kv[0]) <= i, x, NEG_INF)
            before = peak[...]
            now = jnp.maximum(before, x.max(1, keepdims=True))
            safe = jnp.where(now == NEG_INF, 0.0, now) if tested else now
            p = jnp.exp2(x - spread(safe, at_once))
            decay = jnp.exp2(before - safe)
            total[...] = total[...] * decay + p.sum(1, keepdims=True)
            peak[...] = now
            value = tokens(1, first)
            acc[...] = acc[...] * spread(decay, dim) + dot(p.astype(value.dtype), value, (1, 0), exact)

        @pl.when(end[c] & 2 == 2)
        def _() -> None:
            empty = total[...] == 0
            one = jnp.where(empty, 1.0, total[...])
            out[0, 0] = (acc[...] * spread(1.0 / one, dim)).astype(out.dtype)
            lse[0, 0] = jnp.where(empty, NEG_INF, peak[...] * (1 / LOG2E) + jnp.log(one)).T[:1]

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda c, head, row, *_: (head[c], row[c], 0, 0))

    def of_entry(e: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 2, block, dim), lambda c, head, *s: (head[c], s[-1][c * count + e], 0, 0, 0))

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(names),
            grid=chunks["head"].shape,
            in_specs=[of_row(own, dim), *map(of_entry, range(count))],
            out_specs=[of_row(own, dim), of_row(1, own)],
            scratch_shapes=[pltpu.VMEM((own, n), jnp.float32) for n in (LANES, LANES, dim)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((*query.shape[:2], 1, own), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="by_specs",
    )(*(chunks[n] for n in names), query, *[pairs] * count)


def compile_specs(topology: str, block: int, count: int, tested: bool, length: int, heads: int) -> dict[str, Any]:
    """Compile a grid over full lists; the contents of lists are arguments, so nothing depends on them."""
    import jax
    import jax.numpy as jnp

    from xsake.kernels_pallas_tpu import ahead

    own, columns = OWN[block], length // block
    steps = grid_steps(length // block, heads, count)
    place = ahead.one_device(topology)

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    chunks = {name: array(steps) for name in ("head", "row", "size", "end")} | {"list": array(steps * count)}
    query = array(heads, length // own, own, 128, dtype=jnp.bfloat16)
    pairs = array(heads, columns, 2, block, 128, dtype=jnp.bfloat16)
    jax.jit(lambda *x: by_specs(*x, count=count, tested=tested)).lower(chunks, query, pairs).compile()
    return {"name": "by_specs", "list_bytes": list_bytes(block, count, length, heads)}


def grid_steps(rows: int, heads: int, count: int) -> int:
    """Number of chunks of a causal mask that has all its blocks."""
    return heads * sum(-(-(row + 1) // count) for row in range(rows))


def list_bytes(block: int, count: int, length: int, heads: int) -> int:
    return 4 * grid_steps(length // block, heads, count) * (4 + count)


def in_process(case: dict[str, Any]) -> dict[str, Any]:
    from xsake.kernels_pallas_tpu import ahead

    ahead.without_hardware()
    return compile_specs(**case)


def grid_step(bundles: list[str]) -> tuple[int, int]:
    """(cycles that every grid step takes, cycles that only the first and last steps of a row add)."""
    depth = [re.match(r"[^:]*:\s*(>*)", line)[1] for line in bundles]
    inside = [n for n, marks in enumerate(depth) if marks]
    first, last = inside[0], inside[-1]
    seldom = 0
    for n in range(first, last):
        if jump := re.search(r"sbr\.rel \(.*?target bundleno = (\d+)", bundles[n]):
            skipped = bundles[n + 1 + DELAY : int(jump[1])]
            if skipped and not any(re.search(r"\bvmat|\bdma", line) for line in skipped):
                seldom += len(skipped)
    return last + 1 - first - seldom, seldom


def measure_specs(topology: str, block: int, count: int) -> dict[str, Any]:
    """At short blocks all chunks test their elements, as in `walk`; at 512 none does, which flatters `specs`."""
    tested = block < 512
    case = {"topology": topology, "block": block, "count": count, "tested": tested, "length": 4096, "heads": 2}
    with dumped(case, "benchmarks.tpu.gather_shapes") as (directory, compiled):
        schedule = read_schedule(directory, compiled["name"])
        step, seldom = grid_step(bundles_of(dump_of(directory, compiled["name"]).read_text()))
    area = OWN[block] * block * count
    inner = measure(schedule, [area])["loops"][0]
    whole = []
    for blocks in masks(block):
        active = blocks.sum(-1)
        steps = np.maximum(1, -(-active // count)).sum()
        whole.append(int(steps * (step + GRID_STEP) + active.size * seldom))
    return {
        "shape": "specs",
        **case,
        "inner": inner["inner"],
        "loop": round(step * TILE / area, 1),
        "step": seldom,
        "spills": inner["spills"],
        "vmem_bytes": schedule.vmem_bytes,
        "whole": whole,
    }


def measure_walk(topology: str, block: int) -> dict[str, Any]:
    case = {"topology": topology, "kernel": "forward", "block": block, "head_dim": 128, "tiling": None}
    with dumped({"whose": "ours", **case}) as (directory, compiled):
        schedule = read_schedule(directory, compiled["name"])
        bundles = bundles_of(dump_of(directory, compiled["name"]).read_text())
    row = {**compiled, **measure(schedule, compiled["areas"])}
    row["step"] = sum(grid_step(bundles)) - sum(loop.bundles for loop in schedule.loops()[1])
    wide = row["loops"][0]
    return {
        "shape": "walk",
        "topology": topology,
        "block": block,
        "count": row["tiling"]["wide"],
        "inner": wide["inner"],
        "loop": wide["loop"],
        "step": row["step"],
        "spills": wide["spills"],
        "vmem_bytes": row["vmem_bytes"],
        "whole": [round(cycles(row, blocks, True, block)) for blocks in masks(block)],
        "tiling": row["tiling"],
    }


def masks(block: int) -> list[np.ndarray]:
    """Per length in LENGTHS: causal blocks of 16 heads, with 10% to 90% of the blocks that causality allows."""
    return [masks_like_hads(True, blocks=length // block)[0] for length in LENGTHS]


def longest(topology: str) -> dict[str, Any]:
    """Whether `specs` compiles for 131072 tokens and 32 heads: its lists must lie in SMEM, all at once."""
    case = {"topology": topology, "block": 128, "count": 16, "tested": True, "length": 131072, "heads": 32}
    try:
        with dumped(case, "benchmarks.tpu.gather_shapes") as (_, compiled):
            return {**case, "list_bytes": compiled["list_bytes"], "problem": None}
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines() if "smem" in line.lower() or "RESOURCE" in line]
        return {**case, "list_bytes": list_bytes(128, 16, 131072, 32), "problem": (said or str(error).splitlines())[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(in_process(json.loads(args.case))), flush=True)
        os._exit(0)
    rows = []
    print(f"topology shape  block  n  inner   loop  step  spills  whole calls of {LENGTHS} tokens", flush=True)
    for topology in TOPOLOGIES:
        for block, counts in CHUNKS.items():
            rows.append(measure_walk(topology, block))
            rows += [measure_specs(topology, block, count) for count in counts]
            for r in rows[-1 - len(counts) :]:
                print(
                    f"{topology:8} {r['shape']:6} {block:5} {r['count']:2} {r['inner']:6.0f} {r['loop']:6.0f} "
                    f"{r['step']:5} {r['spills']:7}  {r['whole']}",
                    flush=True,
                )
    long = [longest(topology) for topology in TOPOLOGIES]
    print(json.dumps(long), flush=True)
    if args.record:
        from benchmarks import record

        unit = "cycles per 512 x 512 logits of one head, bfloat16, D 128; step: cycles per row; whole: cycles per call"
        print(record.save("tpu_gather_shapes", {"shapes": rows, "longest": long}, unit=unit, lengths=LENGTHS))


if __name__ == "__main__":
    main()
