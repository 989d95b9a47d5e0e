"""`xsake train`: train a model, or carry on a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors


def train(
    data: Annotated[Path, typer.Option(help="A folder made by `xsake data build`.")],
    run: Annotated[Path, typer.Option(help="The folder of the run; one that was stopped is carried on.")],
    preset: Annotated[str, typer.Option(help="The model's shape.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Steps in all.")] = 1000,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    microbatches: Annotated[int, typer.Option(help="Parts of a batch, one after the other.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps until then.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(help="The largest norm of a gradient.")] = 1.0,
    attention: Annotated[
        str, typer.Option(help="dense, cudnn, hads, or a pattern: sink_window, sliding_window, big_bird, random.")
    ] = "dense",
    density: Annotated[float, typer.Option(help="Share of active blocks, of a pattern or of hads.")] = 1.0,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 128,
    recalibrate_every: Annotated[
        int | None, typer.Option(help="Steps between calibrations of hads; by default a tenth of all.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: bfloat16, float32.")] = "bfloat16",
    remat: Annotated[bool, typer.Option(help="Less memory, more arithmetic.")] = False,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the data.")] = 0,
    mesh: Annotated[str, typer.Option(help="Devices, data x model.")] = "1x1",
    fsdp: Annotated[bool, typer.Option(help="Split weights and optimiser over the data axis too.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    keep: Annotated[int, typer.Option(help="Checkpoints kept.")] = 3,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 for none.", min=0)] = 0,
    eval_batches: Annotated[int, typer.Option(help="Held-out batches of an evaluation.")] = 8,
    wandb: Annotated[bool, typer.Option(help="Log to Weights & Biases too.")] = False,
    quiet: Annotated[bool, typer.Option(help="Print nothing.")] = False,
    distributed: Annotated[bool, typer.Option(help="One of several processes, as the cluster says.")] = False,
    coordinator: Annotated[str | None, typer.Option(help="Or by hand: host:port of process 0,")] = None,
    processes: Annotated[int | None, typer.Option(help="how many processes,")] = None,
    process: Annotated[int | None, typer.Option(help="and which one this is.")] = None,
) -> None:
    """Train a model on token files. Run it again after a stop, of whatever kind, and it goes on to the same numbers."""
    with plain_errors():
        import jax

        from xsake.model.config import PRESETS
        from xsake.model.distributed import initialize
        from xsake.model.fetch import cache_folder
        from xsake.model.train_config import TrainConfig
        from xsake.model.train_loop import train

        if preset not in PRESETS:
            raise ValueError(f"{preset=} must be one of {', '.join(PRESETS)}")
        config = TrainConfig(
            model=PRESETS[preset],
            length=length,
            batch=batch,
            microbatches=microbatches,
            steps=steps,
            learning_rate=learning_rate,
            warmup=min(warmup, steps),
            weight_decay=weight_decay,
            clip=clip,
            attention=attention,
            density=density,
            block=block,
            recalibrate_every=_recalibrate_every(recalibrate_every, attention, steps),
            dtype=dtype,
            remat=remat,
            seed=seed,
        )
        if distributed or (coordinator, processes, process) != (None, None, None):
            initialize(coordinator, processes, process)
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        try:
            file = train(
                config,
                data=data,
                run=run,
                mesh=parse_mesh(mesh),
                fsdp=fsdp,
                checkpoint_every=checkpoint_every,
                keep=keep,
                eval_every=eval_every,
                eval_batches=eval_batches,
                wandb=wandb,
                quiet=quiet,
            )
        except FloatingPointError as error:
            raise ValueError(str(error)) from error
        if not quiet:
            typer.echo(f"trained: {file}")


def _recalibrate_every(given: int | None, attention: str, steps: int) -> int:
    if given is not None:
        return given
    return max(1, steps // 10) if attention == "hads" else 0


def parse_mesh(text: str) -> tuple[int, int]:
    """
    >>> parse_mesh("4x2")
    (4, 2)
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"mesh={text!r} must be two numbers of devices, data x model, as in 4x2")
    return int(parts[0]), int(parts[1])
