"""Training on a GPU: dense attention by cuDNN against a fixed block-sparse pattern and HADS, on real text.

    python -m benchmarks.train.gpu DATA                    measure and print
    python -m benchmarks.train.gpu DATA --record           also write benchmarks/results/train_gpu.json
    python -m benchmarks.train.gpu DATA --out DIR          write the summary, as it grows, and the run files to DIR;
                                                           what its summary already has of this commit is not run again
    python -m benchmarks.train.gpu --skip-training         step times alone, on random tokens without DATA
    python -m benchmarks.train.gpu DATA --skip-times       whole runs alone
    python -m benchmarks.train.gpu DATA --only small       one preset;   --kinds hads: one kind of attention
    python -m benchmarks.train.gpu --skip-training --only tiny --dense xsake --block 4 --lengths 64 --tokens-per-step 64
                                                           a small run, anywhere

DATA is a folder made by `xsake data build`; its files may be packed with xz, and are then unpacked beside the runs.
Needs neither the `tokenizers` package nor the command line.

Two parts: the time of a step at 8192 and at 32768 tokens (`--lengths`), and whole runs of 50 million tokens at 4096.
Programs are compiled side by side beforehand.

Step times: the kinds of attention are the contestants of one race per preset and length, and every call is a training
step on the contestant's own state. HADS calibrates before the race and never within it: its steps choose their blocks,
and a run's recalibrations come on top. A race is only ever run and recorded whole.

A summary whose other part was recorded by an earlier run keeps that part: with --skip-training its whole runs, with
--skip-times its step times. Rows of another commit then name their own environment.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import lzma
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks import record
from benchmarks.harness import turns
from benchmarks.harness.script import Record, Row, listed, parser
from xsake._ground import atomic
from xsake._measure.timing import Timing, race
from xsake.hads.selection.mask_function import mask_shape
from xsake.model.data.shards import write_shard
from xsake.model.network.config import PRESETS
from xsake.model.training.config import TrainConfig
from xsake.model.training.loop import train
from xsake.model.training.trainer import Trainer
from xsake.model.training.watch.run_file import read_events

PRESET_NAMES = ("small", "gpt2-124m")
TOKENS = 50_000_000
TOKENS_PER_STEP = 65_536
LEARNING_RATE = {"small": 2e-3, "gpt2-124m": 1e-3, "tiny": 1e-3}
KINDS = {"dense": "cudnn", "sparse": "sink_window", "hads": "hads"}  # and what `TrainConfig` calls them
DENSITY = 0.43  # of the kinds that are not dense
CALIBRATIONS = 8  # of HADS in a run
RACE_LENGTHS, RUN_LENGTH = (8192, 32768), 4096
TURN_SECONDS = 0.5  # of a race
SKIPPED_STEPS = 10  # at the start of a run: compilation, and clocks that rise
RANDOM_STEPS = 8  # as many steps' tokens are drawn where there is no text; then they come again


def configuration(preset: str, kind: str, length: int, args: argparse.Namespace) -> TrainConfig:
    steps = -(-args.tokens // args.tokens_per_step)
    attention = "dense" if (kind, args.dense) == ("dense", "xsake") else KINDS[kind]
    model = PRESETS[preset]
    recalibrates = kind == "hads" and length == RUN_LENGTH
    return TrainConfig(
        model=dataclasses.replace(model, context=max(model.context, length)),
        length=length,
        batch=args.tokens_per_step // length,
        steps=steps,
        warmup=min(100, steps),
        learning_rate=LEARNING_RATE[preset],
        attention=attention,
        density=1.0 if kind == "dense" else DENSITY,
        block=args.block,
        recalibrate_every=-(-steps // CALIBRATIONS) if recalibrates else 0,
    )


@contextlib.contextmanager
def token_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder with the token files: of DATA, or of random tokens."""
    if args.data is not None:
        yield unpack(args.data, args.work)
        return
    vocabulary = min(PRESETS[preset].vocab_size for preset in args.only)
    tokens = np.random.default_rng(0).integers(0, vocabulary, RANDOM_STEPS * args.tokens_per_step + 1)
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "train-00000.tokens", tokens, vocab_size=vocabulary, tokenizer="random tokens")
        yield Path(folder)


def unpack(data: Path, work: Path) -> Path:
    """The folder with the token files, unpacked if they are packed."""
    packed = sorted(data.glob("*.tokens.xz"))
    if not packed:
        return data
    target = work / "tokens"
    target.mkdir(parents=True, exist_ok=True)

    def one(path: Path) -> None:
        if not (target / path.stem).exists():
            with lzma.open(path) as source, atomic.replacing(target / path.stem) as sink:
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
    if config.length == RUN_LENGTH:
        program.evaluate.lower(state.params, mask_fn, batch).compile()


def race_steps(trainers: Mapping[str, Trainer], rounds: int) -> dict[str, Timing]:
    """Seconds per step of each kind, which goes on training its own state from turn to turn.

    `Trainer.begin` has given HADS its masks, and `Trainer.step` never recalibrates: training loops do that between
    steps.
    """
    times = race({kind: t.step for kind, t in trainers.items()}, rounds=rounds, min_seconds=TURN_SECONDS)
    for trainer in trainers.values():
        del trainer.state
    return times


def run_once(trainer: Trainer, name: str, data: Path, work: Path) -> Row:
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
        **speed(trainer, statistics.median(seconds)),
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


def speed(trainer: Trainer, seconds: float) -> Row:
    found = trainer.speed(seconds)
    return {name: found[name] for name in ("tokens_per_second", "mfu")}


def about(preset: str, kind: str, trainer: Trainer) -> Row:
    config = dataclasses.asdict(trainer.config)
    return {
        "preset": preset,
        "kind": kind,
        "length": trainer.config.length,
        "density": trainer.density,
        "config": config,
    }


def is_whole_run(row: Row) -> bool:
    return "held_out_loss" in row


def done_before(args: argparse.Namespace) -> list[Row]:
    """Rows that an earlier run left and this run will not measure: the part that is skipped, whoever measured it, and
    with --out the results of this commit."""
    if args.out is None or not (path := args.out / "train_gpu.json").exists():
        return []
    run, here = json.loads(path.read_text()), record.environment()["commit"]
    rows = []
    for row in run["results"]:
        environment = row.get("environment", run["environment"])
        is_here = environment["commit"] == here
        is_skipped = args.skip_training if is_whole_run(row) else args.skip_times
        if is_skipped:
            rows.append(row if is_here else row | {"environment": environment})
        elif is_here and args.out != record.RESULTS:
            rows.append(row)
    return rows


def show(row: Row) -> None:
    name = f"{row['preset']}-{row['kind']}-{row['length']}"
    mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
    loss = f"  held-out loss {row['held_out_loss']:.4f}" if is_whole_run(row) else ""
    print(
        f"{name:26} density {row['density']:.1%}  {row['seconds']['median'] * 1e3:8.2f} ms per step  "
        f"{row['tokens_per_second']:10,.0f} tokens/s{mfu}{loss}",
        flush=True,
    )


def measure(args: argparse.Namespace, data: Path) -> None:
    """Race, then train, whatever was not done before; print it, and write it as it grows."""
    rows = Record("train_gpu", args.out)
    rows += done_before(args)
    done = {(r["preset"], r["kind"], r["length"]): r["config"] for r in rows}

    def is_missing(preset: str, kind: str, length: int) -> bool:
        return done.get((preset, kind, length)) != configuration(preset, kind, length, args).to_json()

    races = [(preset, length) for length in args.lengths for preset in args.only] * (not args.skip_times)
    races = [(preset, length) for preset, length in races if any(is_missing(preset, k, length) for k in args.kinds)]
    runs = [(preset, kind) for preset in args.only for kind in args.kinds] * (not args.skip_training)
    runs = [(preset, kind) for preset, kind in runs if is_missing(preset, kind, RUN_LENGTH)]
    jobs = [(preset, kind, length) for preset, length in races for kind in args.kinds]
    jobs += [(preset, kind, RUN_LENGTH) for preset, kind in runs]
    trainers = {job: Trainer(configuration(*job, args), data=data) for job in jobs}
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(precompile, trainers.values()))
        # The initial weights of each kind, and HADS's calibration, are programs to compile, too.
        list(pool.map(Trainer.begin, (trainers[job] for job in jobs if job[2] != RUN_LENGTH)))
    print(f"compiled {len(jobs)} programs in {time.perf_counter() - start:.0f} s", flush=True)
    turns.begin()

    def add(found: Sequence[Row]) -> None:
        rows.add(*found)
        for row in found:
            show(row)

    for preset, length in races:
        racing = {kind: trainers.pop((preset, kind, length)) for kind in args.kinds}
        times = race_steps(racing, args.rounds)
        # Ratios come from one race: kinds that were timed without these are not left beside them.
        rows[:] = [r for r in rows if (r["preset"], r["length"]) != (preset, length)]
        add(
            [
                about(preset, kind, trainer)
                | {"seconds": dataclasses.asdict(times[kind]), **speed(trainer, times[kind].median)}
                for kind, trainer in racing.items()
            ]
        )
    for preset, kind in runs:
        trainer, name = trainers[preset, kind, RUN_LENGTH], f"{preset}-{kind}-{RUN_LENGTH}"
        found = run_once(trainer, name, data, args.work)
        file = Path(found.pop("run_file"))
        if args.out is not None:
            folder = args.out / "train_gpu" if args.out == record.RESULTS else args.out
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / f"{name}.jsonl")
        rows[:] = [r for r in rows if (r["preset"], r["kind"], r["length"]) != (preset, kind, RUN_LENGTH)]
        add([about(preset, kind, trainer) | found])


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, rounds=5)
    options.add_argument("data", type=Path, nargs="?", help="a folder made by `xsake data build`")
    options.add_argument(
        "--work", type=Path, default=record.ROOT / "out" / "train_gpu", help="folder for data and runs"
    )
    options.add_argument("--only", type=listed(among=LEARNING_RATE), default=[*PRESET_NAMES], help="presets")
    options.add_argument("--kinds", type=listed(among=KINDS), default=[*KINDS], help="of attention")
    options.add_argument(
        "--lengths", type=listed(int), default=[*RACE_LENGTHS], help="tokens per sequence of the step times"
    )
    options.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP, help="tokens per step")
    options.add_argument("--block", type=int, default=128, help="tokens per block")
    options.add_argument("--dense", default="cudnn", choices=["cudnn", "xsake"], help="who computes dense attention")
    options.add_argument("--tokens", type=int, default=TOKENS, help="tokens per run")
    options.add_argument("--skip-training", action="store_true", help="step times alone")
    options.add_argument("--skip-times", action="store_true", help="whole runs alone")
    args = options.parse_args(given)
    if RUN_LENGTH in args.lengths:
        options.error(f"--lengths {RUN_LENGTH}: whole runs have this length; step times are of other lengths")
    for length in args.lengths * (not args.skip_times) + [RUN_LENGTH] * (not args.skip_training):
        if min(length, args.tokens_per_step) < 1 or args.tokens_per_step % length:
            options.error(
                f"--tokens-per-step {args.tokens_per_step} must be a multiple of {length} tokens per sequence"
            )
    if args.data is None and not args.skip_training:
        options.error("whole runs need DATA, a folder made by `xsake data build`; --skip-training needs none")
    return args


def main(given: Sequence[str] | None = None) -> None:
    args = parsed(given)
    with token_folder(args) as data:
        measure(args, data)


if __name__ == "__main__":
    main()
