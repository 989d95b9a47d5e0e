"""The throughputs that `xsake plan` predicts from, taken out of the recorded runs: measures nothing.

    python -m benchmarks.plan_rates           write src/xsake/_plan/rates.json
    python -m benchmarks.plan_rates --check   exit 1 if that file is not what the recorded runs say

Attention: XSAKE's calls of `gpu_attention`, but for those within the densities that `gpu_peers` has of the same call,
where runs are sustained and in random order. TPUs: cycles of the compiler's schedules (`tpu_schedule`). All other work
of a training step: the steps of `train_gpu`, less their attention by the throughput of the kernel that they ran; not
HADS's steps, which also choose blocks, nor steps that are mostly attention, nor those kept from an older commit, whose
kernels ran at another throughput. All other work of a prefill, and the choice of blocks: the prompts that HADS read in
`gpu_prompt_long`, whose record has the time of each kernel of a layer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any

from benchmarks import record
from xsake._ground import atomic
from xsake._plan.attention import blocks_per_row, forward_flops
from xsake._plan.models import PUBLISHED, block_weights, matmul_weights
from xsake._plan.rates import BOTH, BOTH_FLOPS, FILE, FORWARD, Point, Prompt, Rest, attention_rate
from xsake.autotune.workloads import WORKLOADS
from xsake.model.network.config import PRESETS
from xsake.model.training.watch.mfu import PEAK_FLOPS

RECORDS = ("gpu_attention", *record.load_all("gpu_peers_"), "train_gpu", "gpu_prompt_long", "tpu_schedule")
BLOCKS = {"xsake": 128, "xsake block 64": 64}  # of the calls of gpu_attention, by the name of the contestant
# TPU chips: JAX's name, and how many multiply-adds its matrix units do per cycle.
TPUS = {"v5e:2x2": ("TPU v5 lite", 4 * 128 * 128), "v6e:2x2": ("TPU v6 lite", 2 * 256 * 256)}
# Share of a step's time: where attention takes more, the rest is mostly the error of the subtraction.
MOST_ATTENTION = 2 / 3
ATTENTION_KERNEL = "entry_mosaic_gpu_kernel"  # the forward's
LOGITS = 512 * 512  # the schedules' cycles are for as many


def attention_points() -> list[Point]:
    points = [
        _point(name, r, 128)
        for name, run in record.load_all("gpu_peers_").items()
        for r in run["results"]
        if r["implementation"] == "xsake" and r["mask"].startswith("random") and r["workload"] in WORKLOADS
    ]
    sustained: dict[tuple[str, str, int], list[float]] = {}
    for point in points:
        assert point.blocks_per_row is not None
        sustained.setdefault((point.call, point.direction, point.block), []).append(point.blocks_per_row)
    for result in record.load("gpu_attention")["results"]:
        if result["implementation"] in BLOCKS:
            point = _point("gpu_attention", result, BLOCKS[result["implementation"]])
            known = sustained.get((point.call, point.direction, point.block), [math.inf])
            if not min(known) <= (point.blocks_per_row or 0.0) <= max(known):
                points.append(point)
    return points + tpu_points()


def _point(name: str, result: dict[str, Any], block: int) -> Point:
    workload = WORKLOADS[result["workload"]]
    if workload.is_causal:
        active = blocks_per_row(workload.length, block, result["density"])
    else:
        active = result["density"] * workload.length / block
    return Point(
        device=record.load(name)["environment"]["device"],
        record=name,
        call=workload.name,
        direction=result["direction"],
        keys=workload.length,
        head_dim=workload.head_dim,
        block=block,
        blocks_per_row=round(active, 4),
        tflops=round(result["tflops"], 2),
    )


def tpu_points() -> list[Point]:
    """Cycles of the loop around a tile, its transfers included, where the three kernels are recorded."""
    cycles: dict[tuple[str, int, int], dict[str, float]] = {}
    for r in record.load("tpu_schedule")["results"]["schedules"]:
        if r["whose"] == "ours":
            cycles.setdefault((r["topology"], r["head_dim"], r["block"]), {})[r["kernel"]] = r["loops"][0]["loop"]
    points = []
    for (topology, head_dim, block), of in sorted(cycles.items()):
        if of.keys() != {"forward", "dq", "dkv"}:
            continue
        kind, per_cycle = TPUS[topology]
        clock = PEAK_FLOPS[kind] / (2 * per_cycle)
        flops = 4 * LOGITS * head_dim
        for direction, times, loops in ((FORWARD, 1.0, [of["forward"]]), (BOTH, BOTH_FLOPS, list(of.values()))):
            points.append(
                Point(
                    device=kind,
                    record="tpu_schedule",
                    call=f"{topology.split(':')[0]}, blocks of {block}, D {head_dim}",
                    direction=direction,
                    keys=512,
                    head_dim=head_dim,
                    block=block,
                    blocks_per_row=None,
                    tflops=round(times * flops * clock / sum(loops) / 1e12, 2),
                )
            )
    return points


def rest_of_steps(points: list[Point]) -> list[Rest]:
    run = record.load("train_gpu")
    return [
        rest
        for r in run["results"]
        if "beside" not in r and "environment" not in r and r["kind"] != "hads"
        if (rest := _rest(r, run["environment"]["device"], points)) is not None
    ]


def _rest(result: dict[str, Any], device: str, points: list[Point]) -> Rest | None:
    """None for a step that is mostly attention."""
    config, length, density = PRESETS[result["preset"]], result["length"], result["density"]
    batch, block = result["config"]["batch"], result["config"]["block"]
    flops = forward_flops(tokens=length, block=block, density=density, q_heads=config.q_heads, head_dim=config.head_dim)
    if result["kind"] == "dense":
        tflops = _cudnn(config.head_dim)
    else:
        tflops = attention_rate(
            points,
            device=device,
            direction=BOTH,
            keys=length,
            head_dim=config.head_dim,
            block=block,
            blocks_per_row=blocks_per_row(length, block, density),
        ).tflops
    attention = BOTH_FLOPS * flops * config.layers * batch / (tflops * 1e12)
    seconds = result["seconds"]["median"]
    if attention > MOST_ATTENTION * seconds:
        return None
    return Rest(
        device=device,
        record="train_gpu",
        model=result["preset"],
        width=config.width,
        attention=result["kind"],
        density=round(density, 4),
        length=length,
        batch=batch,
        seconds=round(seconds, 6),
        attention_seconds=round(attention, 6),
        tflops=round(6 * matmul_weights(config) * batch * length / (seconds - attention) / 1e12, 2),
    )


def prompts() -> list[Prompt]:
    run = record.load("gpu_prompt_long")
    return [
        _prompt(row, way, run["environment"]["device"])
        for row in run["results"]
        for way in row["kernels"]
        if way.startswith("HADS") and row["kernels"][way]
    ]


def _prompt(row: dict[str, Any], way: str, device: str) -> Prompt:
    config, length, layers = PUBLISHED[row["model"]], row["length"], row["layers"]
    kernels, seconds = row["kernels"][way]["kernels"], row["seconds"][way]["median"]
    attention = kernels[ATTENTION_KERNEL]["seconds"]
    choice = sum(kernel["seconds"] for name, kernel in kernels.items() if name.startswith("hads_"))
    others = seconds - layers * (attention + choice)
    return Prompt(
        device=device,
        record="gpu_prompt_long",
        model=row["model"],
        width=config.width,
        layers=layers,
        q_heads=config.q_heads,
        density=float(way.removeprefix("HADS ").removesuffix("%")) / 100,
        length=length,
        seconds=round(seconds, 6),
        attention_seconds=round(attention, 6),
        choice_seconds=round(choice, 6),
        tflops=round(2 * layers * block_weights(config) * length / others / 1e12, 2),
    )


def _cudnn(head_dim: int) -> float:
    """Dense causal attention by cuDNN, both directions: of the recorded call with this head_dim."""
    return next(
        r["tflops"]
        for r in record.load("gpu_attention")["results"]
        if (r["implementation"], r["direction"], r.get("asked")) == ("cudnn", BOTH, 1.0)
        and WORKLOADS[r["workload"]].head_dim == head_dim
        and WORKLOADS[r["workload"]].is_causal
    )


def made() -> str:
    """The text of rates.json: one entry per line."""
    points = attention_points()
    sources = {}
    for name in RECORDS:
        e = record.load(name)["environment"]
        sources[name] = {"date": e["date"], "commit": e["commit"][:7], "device": e["device"]}
    parts = {
        "made_by": json.dumps("python -m benchmarks.plan_rates"),
        "records": "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sources.items()) + "\n }",
        "attention": _lines(points),
        "rest_of_step": _lines(rest_of_steps(points)),
        "prompts": _lines(prompts()),
    }
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def _lines(entries: list[Any]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(dataclasses.asdict(entry))}" for entry in entries) + "\n ]"


def main() -> None:
    if "--check" in sys.argv:
        stale = not FILE.exists() or FILE.read_text() != made()
        sys.exit(f"{FILE.name} is not what the recorded runs say. Run python -m benchmarks.plan_rates" if stale else 0)
    atomic.write_text(FILE, made())


if __name__ == "__main__":
    main()
