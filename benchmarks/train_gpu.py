"""Training on a GPU: dense attention by cuDNN against a fixed block-sparse pattern and HADS, on real text.

    python -m benchmarks.train_gpu DATA                    measure and print
    python -m benchmarks.train_gpu DATA --record           also write benchmarks/results/train_gpu.json
    python -m benchmarks.train_gpu DATA --out DIR          write the summary, as it grows, and the run files to DIR;
                                                           what its summary already has of this commit is not run again
    python -m benchmarks.train_gpu DATA --only small       one preset;   --skip-training: step times alone
    python -m benchmarks.train_gpu DATA --kinds hads       one kind of attention;   --skip-times: whole runs alone

DATA is a folder made by `xsake data build`; its files may be packed with xz, and are then unpacked beside the runs.
Needs neither the `tokenizers` package nor the command line.

Two parts: the time of a step at 8192 tokens, and whole runs of 50 million tokens at 4096. Programs are compiled side by
side beforehand.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import record
from xsake import _atomic
from xsake.hads.selection.mask_function import mask_shape
from xsake.model.config import PRESETS
from xsake.model.run_file import read_events
from xsake.model.train_config import TrainConfig
from xsake.model.train_loop import train
from xsake.model.trainer import Trainer

PRESET_NAMES = ("small", "gpt2-124m")
TOKENS = 50_000_000
TOKENS_PER_STEP = 65_536
LEARNING_RATE = {"small": 2e-3, "gpt2-124m": 1e-3}
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {"attention": "cudnn"},
    "sparse": {"attention": "sink_window", "density": 0.43, "block": 128},
    "hads": {"attention": "hads", "density": 0.43, "block": 128},
}
CALIBRATIONS = 8  # of HADS in a run
LONG, USUAL = 8192, 4096
TIMED_STEPS = 20
SKIPPED_STEPS = 10  # at the start of a run: compilation, and clocks that rise


def configuration(preset: str, kind: str, length: int, tokens: int = TOKENS) -> TrainConfig:
    steps = -(-tokens // TOKENS_PER_STEP)
    more = {"recalibrate_every": -(-steps // CALIBRATIONS)} if kind == "hads" else {}
    return TrainConfig(
        model=PRESETS[preset],
        length=length,
        batch=TOKENS_PER_STEP // length,
        steps=steps,
        warmup=min(100, steps),
        learning_rate=LEARNING_RATE[preset],
        **ATTENTION[kind],
        **more,
    )


def unpack(data: Path, work: Path) -> Path:
    """The folder with the token files, unpacked if they are packed."""
    packed = sorted(data.glob("*.tokens.xz"))
    if not packed:
        return data
    target = work / "tokens"
    target.mkdir(parents=True, exist_ok=True)

    def one(path: Path) -> None:
        if not (target / path.stem).exists():
            with lzma.open(path) as source, _atomic.replacing(target / path.stem) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, packed))
    return target


def precompile(trainer: Trainer) -> None:
    """Compile the programs that the run will need: JAX caches them, and `Trainer` shares them by configuration."""
    program, config = trainer.program, trainer.config
    shape = (config.microbatches, config.batch // config.microbatches, config.length + 1)
    batch = jax.ShapeDtypeStruct(shape, "int32", sharding=program.batch_sharding)
    state, mask_fn = program.abstract_state(), trainer.mask_fn
    if config.attention == "hads":  # there is no mask before the first calibration
        model = config.model
        heads = dict(layers=model.layers, q_heads=model.q_heads, kv_heads=model.kv_heads, head_dim=model.head_dim)
        mask_fn = mask_shape(budget=config.density, block=config.block, length=config.length, **heads)
    program.step.lower(state, mask_fn, batch).compile()
    if config.length == USUAL:
        program.evaluate.lower(state.params, mask_fn, batch).compile()


def time_steps(trainer: Trainer) -> dict[str, Any]:
    """Times of single steps, each waited for; the first SKIPPED_STEPS are not counted."""
    trainer.begin()
    seconds = []
    for number in range(SKIPPED_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        jax.block_until_ready(trainer.step())
        if number >= SKIPPED_STEPS:
            seconds.append(time.perf_counter() - start)
    return {"seconds": spread(seconds), **speed(trainer, seconds)}


def run_once(trainer: Trainer, name: str, data: Path, work: Path) -> dict[str, Any]:
    """A whole run, and what its run file says."""
    start = time.perf_counter()
    file = train(
        trainer.config,
        data=data,
        run=work / "runs" / name,
        checkpoint_every=trainer.config.steps,
        keep=1,
        eval_every=max(1, trainer.config.steps // 4),
        quiet=True,
    )
    events = read_events(file)
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    seconds = [event["seconds"] for event in steps[SKIPPED_STEPS:]]
    return {
        "seconds": spread(seconds),
        **speed(trainer, seconds),
        "wall_seconds": time.perf_counter() - start,
        "tokens": len(steps) * trainer.config.tokens_per_step,
        "train_loss": statistics.fmean(event["loss"] for event in steps[-20:]),
        "held_out_loss": evaluations[-1]["loss"],
        "held_out_losses": [[event["step"], event["loss"]] for event in evaluations],
        "loss_curve": [[event["step"], event["loss"]] for event in steps[:: max(1, len(steps) // 100)]],
        "run_file": str(file),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median": median, "low": low, "high": high}


def speed(trainer: Trainer, seconds: list[float]) -> dict[str, Any]:
    found = trainer.speed(statistics.median(seconds))
    return {name: found[name] for name in ("tokens_per_second", "mfu")}


def about(preset: str, kind: str, trainer: Trainer) -> dict[str, Any]:
    config = dataclasses.asdict(trainer.config)
    return {
        "preset": preset,
        "kind": kind,
        "length": trainer.config.length,
        "density": trainer.density,
        "config": config,
    }


def done_before(out: Path | None) -> list[dict[str, Any]]:
    """Results of this commit that an interrupted run left in `out`."""
    path = None if out is None else out / "train_gpu.json"
    if path is None or not path.exists():
        return []
    run = json.loads(path.read_text())
    return run["results"] if run["environment"]["commit"] == record.environment()["commit"] else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder made by `xsake data build`")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/train_gpu.json")
    parser.add_argument("--out", type=Path, help="folder for the summary and the run files")
    parser.add_argument("--work", type=Path, default=record.ROOT / "out" / "train_gpu", help="folder for data and runs")
    parser.add_argument("--only", default=",".join(PRESET_NAMES), help="presets, with commas between them")
    parser.add_argument("--kinds", default=",".join(ATTENTION), help="kinds of attention, with commas between them")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens per run")
    parser.add_argument("--skip-training", action="store_true", help="step times alone")
    parser.add_argument("--skip-times", action="store_true", help="whole runs alone")
    args = parser.parse_args()
    out = record.RESULTS if args.record else args.out

    args.work.mkdir(parents=True, exist_ok=True)
    data = unpack(args.data, args.work)
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - set(ATTENTION)):
        parser.error(f"unknown kinds {unknown}; there are {', '.join(ATTENTION)}")
    lengths = [LONG] * (not args.skip_times) + [USUAL] * (not args.skip_training)
    results = done_before(args.out)
    done = {(r["preset"], r["kind"], r["length"]) for r in results}
    jobs = [(preset, kind, length) for length in lengths for preset in args.only.split(",") for kind in kinds]
    jobs = [job for job in jobs if job not in done]
    trainers = [Trainer(configuration(*job, args.tokens), data=data) for job in jobs]
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(precompile, trainers))
    print(f"compiled {len(jobs)} programs in {time.perf_counter() - start:.0f} s", flush=True)

    for (preset, kind, length), trainer in zip(jobs, trainers, strict=True):
        name = f"{preset}-{kind}-{length}"
        if length == LONG:
            found = time_steps(trainer)
            del trainer.state
        else:
            found = run_once(trainer, name, data, args.work)
            file = Path(found.pop("run_file"))
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, args.out / f"{name}.jsonl")
        results.append(about(preset, kind, trainer) | found)
        mfu = "" if found["mfu"] is None else f"  MFU {found['mfu']:.1%}"
        loss = f"  held-out loss {found['held_out_loss']:.4f}" if "held_out_loss" in found else ""
        print(
            f"{name:26} density {trainer.density:.1%}  {found['seconds']['median'] * 1e3:8.2f} ms per step  "
            f"{found['tokens_per_second']:10,.0f} tokens/s{mfu}{loss}",
            flush=True,
        )
        if out is not None:
            record.save("train_gpu", results, out)


if __name__ == "__main__":
    main()
