"""Cycles of the TPU kernels' schedules beside splash attention's, from the real compiler and without a TPU.

    python -m benchmarks.tpu.schedule              compile, measure and print
    python -m benchmarks.tpu.schedule --record     also write benchmarks/results/tpu_schedule.json
    XSAKE_TPU_PYTHON=python ...                    compile with another interpreter, one that has libtpu

libtpu (pip install "jax[tpu]") compiles each kernel for a topology and dumps its schedule, one line per bundle; an
empty bundle is a stalled cycle. Counted are the bundles of
  inner   the innermost region that holds the matrix products, by which splash is measured
  loop    the whole body of the loop around `inner`, with the start of transfers and the wait for them
  step    the rest of a grid step: its lists, initialisation and output
There are two loops, over wide chunks and over narrow chunks for the rest; one pass through each is counted. A loop
holds two ways to start the next transfers, of which one runs: `loop` is an estimate from above. Waiting for HBM and
conflicts of memory banks are not modelled, and neither are the about 140 cycles that a grid step costs by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness.script import parser
from benchmarks.harness.tpu_cycles import masks_like_hads, ours_in_all, splash_in_all
from benchmarks.harness.tpu_schedule import measure, read_schedule

# -- compiling ---------------------------------------------------------------------------------------------------------


def compile_ours(topology: str, kernel: str, block: int, head_dim: int, tiling: dict | None) -> dict[str, Any]:
    from xsake.kernels_pallas_tpu import ahead, config

    workload = ahead.Workload(name="", head_dim=head_dim, value_dim=head_dim, block_q=block, block_kv=block)
    chosen = config.default_config(workload.call())
    if tiling:
        chosen = dataclasses.replace(chosen, **{kernel: dataclasses.replace(getattr(chosen, kernel), **tiling)})
    ahead.lower(workload, kernel, chosen, ahead.one_device(topology)).compile()
    t = getattr(chosen, kernel)
    sizes = [t.narrow] if t.mixed and t.wide == t.narrow else [t.wide, t.narrow]  # entries per chunk, by loop
    return {
        "name": f"xsake_{kernel}",
        "areas": [t.own * t.fold * t.entry * n for n in sizes],
        "tiling": dataclasses.asdict(t),
    }


def compile_splash(topology: str, kernel: str, block: int, head_dim: int, compute: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    from xsake.kernels_pallas_tpu import ahead

    length, heads = 4096, 2
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    fn = attend
    if kernel != "forward":
        fn = jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    x = jax.ShapeDtypeStruct((heads, length, head_dim), jnp.bfloat16, sharding=ahead.one_device(topology))
    jax.jit(lambda q, k, v: fn(q, k, v)).lower(x, x, x).compile()
    name = {"forward": "splash_mha_fwd", "dq": "splash_mha_dq", "dkv": "splash_mha_dkv"}[kernel]
    return {"name": name, "areas": [block * block], "tiling": {"block": block, "compute": compute}}


def in_process(case: dict[str, Any]) -> dict[str, Any]:
    """Compile one case; runs in a process of its own, whose flags dump the schedules."""
    from xsake.kernels_pallas_tpu import ahead

    ahead.without_hardware()
    case = dict(case)
    return {"ours": compile_ours, "splash": compile_splash}[case.pop("whose")](**case)


@contextlib.contextmanager
def dumped(case: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Compile a case in a process of its own. Gives the folder of dumped schedules, and the JSON that it printed."""
    with tempfile.TemporaryDirectory() as directory:
        flags = (
            f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
            "--xla_jf_dump_llo_pass_label_regex=(packed-bundles-post-ra|pre-delay|pre-finalize).*"
        )
        python = os.environ.get("XSAKE_TPU_PYTHON", sys.executable)
        result = subprocess.run(
            [python, "-m", "benchmarks.tpu.schedule", "--case", json.dumps(case)],
            env={
                **os.environ,
                "LIBTPU_INIT_ARGS": flags,
                "PYTHONPATH": f"{record.ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            },
            cwd=record.ROOT,
            capture_output=True,
            text=True,
        )
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"{case} did not compile:\n{result.stderr[-3000:]}")
        yield Path(directory), json.loads(lines[-1])


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    with dumped(case) as (directory, compiled):
        return {**case, **compiled, **measure(read_schedule(directory, compiled["name"]), compiled["areas"])}


# -- the table ---------------------------------------------------------------------------------------------------------


def cases(topologies: list[str], head_dims: list[int]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for topology in topologies:
        for head_dim in head_dims:
            for kernel in ("forward", "dq", "dkv"):
                base = {"topology": topology, "kernel": kernel, "head_dim": head_dim}
                blocks = (512, 1024, 128) if kernel == "forward" else (512, 128)
                out += [{**base, "whose": "ours", "block": b, "tiling": None} for b in blocks]
                out.append({**base, "whose": "splash", "block": 512, "compute": 512})
                if kernel == "forward":
                    out.append({**base, "whose": "splash", "block": 1024, "compute": 512})
    return out


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Forward passes over masks of 512-blocks: ours on unequal heads over ours on equal heads, and over splash."""
    out = []
    at = {(r["topology"], r["head_dim"], r["whose"]): r for r in rows if r["kernel"] == "forward" and r["block"] == 512}
    for topology, head_dim, whose in at:
        if whose == "splash" or (topology, head_dim, "splash") not in at:
            continue
        mine, theirs = at[topology, head_dim, "ours"], at[topology, head_dim, "splash"]
        for causal in (False, True):
            unequal, uniform = masks_like_hads(causal)
            cost, even = ours_in_all(unequal, causal, mine), ours_in_all(uniform, causal, mine)
            bar = splash_in_all(unequal, theirs)
            out.append(
                {"topology": topology, "head_dim": head_dim, "causal": causal, "tiles": int(unequal.sum())}
                | {f"over_uniform_{k}": round(cost[k] / even[k], 3) for k in cost}
                | {f"over_splash_{k}": round(cost[k] / bar, 3) for k in cost}
            )
    return out


def show(rows: list[dict[str, Any]]) -> str:
    lines = ["topology  D    kernel   block  whose   inner   loop  tested  step  MXU   spills"]
    for r in rows:
        wide, tested = r["loops"][0], r["loops"][-1]
        lines.append(
            f"{r['topology']:9} {r['head_dim']:<4} {r['kernel']:8} {r['block']:<6} {r['whose']:7} "
            f"{wide['inner']:6.0f} {wide['loop']:6.0f} {tested['loop']:6.0f} {r['step']:6} "
            f"{wide['mxu']:5.0%} {wide['spills']:6}"
        )
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--topology", action="append", help="by default v5e:2x2 and v6e:2x2")
    options.add_argument("--head-dim", action="append", type=int, help="by default 128 and 64")
    options.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options.add_argument(
        "--try", dest="attempt", nargs=3, metavar=("KERNEL", "BLOCK", "TILING"), help="one tiling, as JSON"
    )
    args = options.parse_args()
    if args.case:
        print(json.dumps(in_process(args.case)), flush=True)
        os._exit(0)
    topologies, head_dims = args.topology or ["v5e:2x2", "v6e:2x2"], args.head_dim or [128, 64]
    todo = cases(topologies, head_dims)
    if args.attempt:
        kernel, block, tiling = args.attempt[0], int(args.attempt[1]), json.loads(args.attempt[2])
        one = {"kernel": kernel, "whose": "ours", "block": block, "tiling": tiling}
        todo = [one | {"topology": t, "head_dim": d} for t in topologies for d in head_dims]
    rows = []
    for case in todo:
        rows.append(run_case(case))
        print(show(rows[-1:]).splitlines()[-1] if len(rows) > 1 else show(rows), flush=True)
    whole = totals(rows)
    print(*map(json.dumps, whole), sep="\n")
    if args.out is not None:
        unit = "cycles per 512 x 512 logits of one head, bfloat16; step: cycles a grid step"
        found = {"schedules": rows, "totals": whole}
        print(record.save("tpu_schedule", found, args.out, unit=unit, compiled_for=topologies))


if __name__ == "__main__":
    main()
