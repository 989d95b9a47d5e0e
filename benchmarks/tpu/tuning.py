"""Rank the TPU kernels' tilings by the compiler's schedules, and write the best to the tuning database.

    XSAKE_TPU_PYTHON=python-with-libtpu python -m benchmarks.tpu.tuning --out tuning_db [TOPOLOGY ...]

Every tiling of the search space is compiled for the chip, and the cycles of its loops (benchmarks/tpu/schedule.py) are
summed over the workload's masks. Nothing is run, and waiting for memory is not modelled; such entries say "schedule".
Winners are checked against the oracle by interpretation, on a shorter sequence with the same tiling and mask block.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import xsake
from benchmarks.harness.tpu_cycles import cycles
from benchmarks.tpu.schedule import run_case
from xsake import tuning_db
from xsake._measure import environment
from xsake._measure.closeness import Correctness
from xsake._measure.environment import Facts
from xsake.autotune.measure.contest import Contest
from xsake.autotune.problem import Problem, StudyPlan, label, named
from xsake.autotune.workloads import Workload
from xsake.autotune.write import writer
from xsake.tuning_db import Database, Entry

KINDS = {"v5e:2x2": "TPU v5 lite", "v6e:2x2": "TPU v6 lite"}
WORKLOADS = ("gpt4k", "gpt4k_d64", "llama32k")
BLOCKS = (512, 128)
DENSITIES = (1.0, 0.5, 0.25, 0.1)
WORTH = 0.98  # of the heuristic's cycles: only an estimate below this counts as a gain


@cache
def schedule(topology: str, kernel: str, head_dim: int, block: int, tiling: str) -> dict[str, Any] | str:
    """Cycles of the tiling's loops, or why it did not compile."""
    case = {"topology": topology, "kernel": kernel, "head_dim": head_dim, "block": block, "whose": "ours"}
    try:
        return run_case({**case, "tiling": json.loads(tiling)})
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[-1]


def plans(problem: Problem) -> tuple[list[StudyPlan], dict[float, np.ndarray]]:
    """Studies as the tuner would plan them on a TPU, and the masks' blocks."""
    with xsake.interpret():
        contest = Contest(problem, round_seconds=0.0)
    return contest.plans, {d: np.asarray(m.to_blocks())[0] for d, m in contest.masks.items() if d is not None}


@cache
def verified(kernel: str, head_dim: int, block: int, group: int, part: str) -> Correctness:
    workload = Workload(
        name="short",
        batch=1,
        q_heads=group,
        kv_heads=1,
        length=2 * block,
        head_dim=head_dim,
        is_causal=True,
        block=block,
    )
    with xsake.interpret():
        short = Problem(workload=workload, dtype="bfloat16", densities=(0.5,), implementation="mosaic_tpu")
        return Contest(short, round_seconds=0.0).verify(kernel, 0.5, json.loads(part))


def facts(topology: str) -> Facts:
    packages = ("jax", "jaxlib", "libtpu")
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {packages}}}))"
    python = os.environ.get("XSAKE_TPU_PYTHON", sys.executable)
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    ours = environment.facts().environment
    versions = {"xsake": xsake.__version__} | json.loads(said.splitlines()[-1])
    return Facts(KINDS[topology], "tpu", ours | {"versions": versions})


def tuned(topology: str, plan: StudyPlan, masks: list[np.ndarray], environment: str) -> Entry | None:
    """The entry with the fewest cycles over all masks of the plan's bucket."""
    key, parts = plan.key, {label(part): part for part in plan.parts}
    if key.direction == "dkv":
        masks = [blocks.swapaxes(-1, -2) for blocks in masks]  # steps own keys
    found, failed = {}, 0
    for name in parts:
        row = schedule(topology, key.direction, key.head_dim, key.block_q, name)
        if isinstance(row, str):
            failed += 1
            print(f"  {key.direction} {name}: {row}", flush=True)
        else:
            found[name] = sum(cycles(row, blocks, key.causal, key.block_q) for blocks in masks)
    heuristic = found.get(label(plan.default))
    if heuristic is None:
        return None
    for name in sorted(found, key=lambda n: found[n]):
        if found[name] > WORTH * heuristic:
            name = label(plan.default)
        verdict = verified(key.direction, key.head_dim, key.block_q, key.group, name)
        if verdict.problem is None:
            break
        print(f"  wrong: {name}: {verdict.problem}", flush=True)
    about = {
        "source": "schedule",
        "kernel": plan.kernel,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "speedup": round(heuristic / found[name], 4),
        "cycles": {"default": round(heuristic), "tuned": round(found[name])},
        "trials": {"complete": len(found)} | ({"failed": failed} if failed else {}),
        "seed": 0,
        "errors": {n: {k: float(f"{v:.3g}") for k, v in e.items()} for n, e in verdict.errors.items()},
        "environment": environment,
    }
    print(f"  {key}: {about['speedup']:.3f}x, {name}", flush=True)
    return Entry(key, parts[name], about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", nargs="*", default=list(KINDS), help=f"of {list(KINDS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the database")
    parser.add_argument("--missing", action="store_true", help="keep entries that were made with these kernels")
    args = parser.parse_args()
    for topology in args.topology:
        where = facts(topology)
        path = args.out / tuning_db.file_name(where.device_kind)
        there = Database.read(path) if args.missing and path.exists() else Database(where.device_kind)
        for problem in named(list(WORKLOADS), list(BLOCKS), list(DENSITIES), "bfloat16", "mosaic_tpu"):
            print(f"{topology} {problem.workload.name}, block {problem.workload.block}", flush=True)
            studies, blocks = plans(problem)
            for plan in studies:
                if (old := there.exact(plan.key)) and old.about.get("kernel") == plan.kernel:
                    continue
                masks = [blocks[density] for density in plan.densities if density is not None]
                if entry := tuned(topology, plan, masks, where.environment_id):
                    environments = {where.environment_id: where.environment}
                    writer.merge(path, where.device_kind, [entry], environments)


if __name__ == "__main__":
    main()
