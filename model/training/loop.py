"""The training loop, which resumes a stopped run from its last checkpoint."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from xsake._ground import atomic
from xsake.model.data.shards import TOKENIZER_FILE
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.config import TrainConfig
from xsake.model.training.trainer import Recalibrate, Trainer
from xsake.model.training.watch.report import Report
from xsake.model.training.watch.run_file import CHECKPOINTS_FOLDER, METRICS_FILE, read_events

_AHEAD = 2  # steps: metrics are read so much later, so that the device never waits for the host


def train(
    config: TrainConfig,
    *,
    data: Path,
    run: Path,
    mesh: tuple[int, ...] = (1, 1, 1),
    fsdp: bool = False,
    exchange: str = "auto",
    order: str | None = None,
    checkpoint_every: int = 500,
    keep: int = 3,
    eval_every: int = 0,
    eval_batches: int = 8,
    recalibrate: Recalibrate | None = None,
    track: Sequence[str] = (),
    quiet: bool = False,
) -> Path:
    """Train, or resume a stopped run: the same call again gives the losses of a run that was never stopped.

    The losses are equal bit for bit as far as XLA is deterministic: on a GPU, XLA sums the embedding's gradients in any
    order unless XLA_FLAGS=--xla_gpu_deterministic_ops=true is set.

    Args:
      config: everything that decides the numbers. A run folder of another configuration is refused.
      data: a folder made by `xsake data build`.
      run: the folder of the run: `metrics.jsonl` (one event per line), `checkpoints/`, and a copy of the data's
        `tokenizer.json`, if there is one.
      mesh: devices over ("data", "model") or ("data", "model", "sequence"). The third axis cuts the tokens of each
        sequence. A run may be resumed on another mesh, and with another exchange or order: they change no more than
        rounding.
      fsdp: split weights and optimiser over "data" and "sequence" too.
      exchange: how keys and values travel over "sequence": "gather", "ring", "sparse" or "auto", as
        `xsake.sharded_attention` says.
      order: how tokens lie on "sequence": "contiguous", "zigzag", with which devices have as much to do, or None for
        zigzag where the length is made of whole blocks for it.
      checkpoint_every: steps between checkpoints; the last step has one too.
      keep: how many of the last checkpoints are kept.
      eval_every: steps between evaluations on held-out data, also after the last step; 0 for none.
      eval_batches: held-out batches per evaluation.
      recalibrate: `recalibrate(step, model, tokens) -> mask_fn`, called before the first step and then every
        `config.recalibrate_every` steps with the inputs [B, T] of the step to come. With attention="hads", the
        default is HADS's own callback, which calibrates on dense attention.
      track: trackers that get the events too: "wandb", "tensorboard", "trackio".
      quiet: no progress.

    Returns:
      The path of the run file.
    """
    for name, value in (("checkpoint_every", checkpoint_every), ("keep", keep), ("eval_batches", eval_batches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    trainer = Trainer(config, data=data, mesh=mesh, fsdp=fsdp, exchange=exchange, order=order, recalibrate=recalibrate)
    held, recalibrate_every = trainer.held_out() if eval_every else None, config.recalibrate_every
    metrics_file = run / METRICS_FILE
    done, previous = _look_at(run)
    _check_same_run(run, previous, trainer.description)
    if done == config.steps:
        return metrics_file
    with Checkpoints(run / CHECKPOINTS_FOLDER, keep=keep) as checkpoints:
        if jax.process_index() == 0:
            _keep_tokenizer(data, run)
        if done:
            trainer.restore(checkpoints, done)  # before the run file is touched: the checkpoint may be damaged
        report = Report(run, trainer.description, steps=config.steps, start=done, quiet=quiet, track=track)
        with report:
            if done:
                report.say(f"goes on from step {done}")
            if config.attention not in ("dense", "cudnn"):
                asked = f"{config.density:.0%} asked for, blocks of {config.block} tokens"
                report.say(f"{config.attention} attention keeps {trainer.density:.0%} of the blocks ({asked})")
            if not done:
                trainer.begin()
                report.density(0, trainer.densities())
            clock = _Clock(trainer, report)
            while trainer.taken < config.steps:
                clock.add(trainer.step())
                last = trainer.taken == config.steps
                if held is not None and (last or trainer.taken % eval_every == 0):
                    clock.drain()
                    report.event("eval", trainer.taken, loss=trainer.evaluate(held, eval_batches))
                    clock.restart()
                if not last and trainer.recalibrates and recalibrate_every and trainer.taken % recalibrate_every == 0:
                    clock.drain()
                    start = time.perf_counter()
                    trainer.recalibrate()
                    report.event("recalibrate", trainer.taken, seconds=time.perf_counter() - start)
                    report.density(trainer.taken, trainer.densities())
                    clock.restart()
                if last or trainer.taken % checkpoint_every == 0:
                    clock.drain()
                    report.sync()  # the checkpoint must not hold a step that the run file lacks
                    trainer.save(checkpoints)
                    clock.restart()
    return metrics_file


def _keep_tokenizer(data: Path, run: Path) -> None:
    """Copy the data's tokenizer into the run's folder: a sample of the model then needs nothing else."""
    tokenizer, kept = data / TOKENIZER_FILE, run / TOKENIZER_FILE
    if tokenizer.is_file() and not kept.exists():
        with atomic.replacing(kept) as file:
            file.write(tokenizer.read_bytes())


class _Clock:
    """Reads the metrics of a step `_AHEAD` steps later, and times the step by when its metrics arrive."""

    def __init__(self, trainer: Trainer, report: Report):
        self._trainer, self._report = trainer, report
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        self.restart()

    def restart(self) -> None:
        """Begin timing anew, after work that was not a step."""
        self._last = time.perf_counter()

    def add(self, metrics: Any) -> None:
        self._pending.append((self._trainer.taken, metrics))
        if len(self._pending) > _AHEAD:
            self._read(1)

    def drain(self) -> None:
        self._read(len(self._pending))

    def _read(self, count: int) -> None:
        """Wait for `count` steps; each is given an equal part of the time since the last reading."""
        steps = [self._pending.popleft() for _ in range(count)]
        arrived = jax.device_get([metrics for _, metrics in steps])
        now = time.perf_counter()
        seconds, self._last = (now - self._last) / max(count, 1), now
        for (step, _), metrics in zip(steps, arrived, strict=True):
            values = {name: float(value) for name, value in metrics.items()}
            if not math.isfinite(values["loss"]):
                reason = (
                    f"the loss is {values['loss']} at step {step}; earlier checkpoints are kept. A lower learning rate "
                    f"or a longer warm-up may help"
                )
                self._report.failed(step, reason)
                raise FloatingPointError(reason)
            self._report.step(step, values | self._trainer.speed(seconds))


def _look_at(run: Path) -> tuple[int, dict[str, Any] | None]:
    """How many steps the run in this folder has taken, and its description, if there is a run. Changes nothing."""
    # Does not ask whether the folder exists: the first process makes it, and a later process would find it.
    with Checkpoints(run / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
        if steps := checkpoints.steps():
            return steps[-1], checkpoints.describe(steps[-1])
    for event in read_events(run / METRICS_FILE)[:1]:  # the run began, but has no checkpoint yet
        if event["event"] == "start":
            return 0, {"config": event.get("config"), "data": event.get("data")}
    return 0, None


def _check_same_run(run: Path, previous: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    if previous is None or previous == wanted:
        return
    before, now = _flat(previous), _flat(wanted)
    names = sorted(name for name in before | now if before.get(name) != now.get(name))
    changes = ", ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
    raise ValueError(f"{run} holds a run of another configuration: {changes}. Nothing was changed; give another folder")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
