"""`xsake train`: train a model, or continue a run that was stopped."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import named_as

# Options that `xsake.model.train` takes under the same names; `TrainConfig` takes others.
_OF_RUN = ("fsdp", "exchange", "order", "checkpoint_every", "keep", "eval_every", "eval_batches", "quiet")


def train(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="A folder made by `xsake data build`.")],
    run: Annotated[Path, typer.Option(help="The folder of the run; a run that was stopped is continued.")],
    preset: Annotated[str, typer.Option(help="The model's shape; its vocabulary grows to that of the data.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Total number of steps.")] = 1000,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 16,
    microbatches: Annotated[int, typer.Option(help="Parts of each batch, computed one after the other.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps until the learning rate is highest.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Weight decay; matrices only.")] = 0.1,
    clip: Annotated[float, typer.Option(help="The largest norm of the gradient.")] = 1.0,
    attention: Annotated[
        str, typer.Option(help="dense, cudnn, hads, or a pattern: sink_window, sliding_window, big_bird, random.")
    ] = "dense",
    density: Annotated[float, typer.Option(help="Share of active blocks in a pattern or in hads.")] = 1.0,
    block: Annotated[
        int | None,
        typer.Option(help="Tokens per block; by default the most of 128, 64, 32 and 16 that can have the density."),
    ] = None,
    recalibrate_every: Annotated[
        int | None, typer.Option(help="Steps between calibrations of hads; by default a tenth of all steps.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the arithmetic: bfloat16 or float32.")] = "bfloat16",
    remat: Annotated[bool, typer.Option(help="Recompute activations: less memory, more arithmetic.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    mesh: Annotated[
        str, typer.Option(help="Devices, data x model, such as 4x2, or data x model x sequence, such as 2x2x2.")
    ] = "1x1",
    exchange: Annotated[
        str,
        typer.Option(help="How keys and values travel over the mesh's sequence axis: gather, ring, sparse or auto."),
    ] = "auto",
    order: Annotated[
        str | None,
        typer.Option(help="How tokens lie on it: contiguous or zigzag; by default zigzag where the length allows it."),
    ] = None,
    fsdp: Annotated[bool, typer.Option(help="Split weights and optimiser over data and sequence too.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 3,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 for none.", min=0)] = 0,
    eval_batches: Annotated[int, typer.Option(help="Held-out batches per evaluation.")] = 8,
    track: Annotated[
        list[str] | None, typer.Option(help="Log there too: wandb, tensorboard or trackio. May be given several times.")
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Print nothing.")] = False,
    distributed: Annotated[bool, typer.Option(help="Run as one of several processes, as the cluster says.")] = False,
    coordinator: Annotated[str | None, typer.Option(help="Without a cluster: host:port of process 0.")] = None,
    processes: Annotated[int | None, typer.Option(help="Without a cluster: the number of processes.")] = None,
    process: Annotated[int | None, typer.Option(help="Without a cluster: the number of this process, from 0.")] = None,
) -> None:
    """Train a model on token files. After a stop of any kind, the same command continues, to the same numbers."""
    with plain_errors():
        from xsake._ground.cache import keep_compiled
        from xsake.model.data.shards import open_shards
        from xsake.model.network.config import PRESETS
        from xsake.model.training.attention import BLOCKS, with_block
        from xsake.model.training.config import TrainConfig
        from xsake.model.training.distributed import initialize
        from xsake.model.training.loop import train

        if preset not in PRESETS:
            raise ValueError(f"{preset=} must be one of {', '.join(PRESETS)}")
        if recalibrate_every is None:
            recalibrate_every = max(1, steps // 10) if attention == "hads" else 0
        shape = PRESETS[preset]
        vocabulary = open_shards(data, "train")[0].vocab_size
        if vocabulary > shape.vocab_size:
            shape = dataclasses.replace(shape, vocab_size=-(-vocabulary // 64) * 64)
        changed: dict[str, Any] = dict(
            model=shape, warmup=min(warmup, steps), recalibrate_every=recalibrate_every, block=block or BLOCKS[0]
        )
        config = TrainConfig(**named_as(TrainConfig, context.params) | changed)
        if block is None:
            config = with_block(config)
        if distributed or (coordinator, processes, process) != (None, None, None):
            initialize(coordinator, processes, process)
        keep_compiled()
        try:
            file = train(
                config,
                data=data,
                run=run,
                mesh=parse_mesh(mesh),
                track=track or (),
                **{name: context.params[name] for name in _OF_RUN},
            )
        except KeyboardInterrupt:
            if not quiet:
                typer.echo(f"stopped; the same command {_goes_on(run)}", err=True)
            raise typer.Exit(130) from None
        if not quiet:
            typer.echo(f'trained: {file}\na sample: xsake generate "The" --model {shlex.quote(str(run))}')


def _goes_on(run: Path) -> str:
    from xsake.model.training.checkpoints import Checkpoints
    from xsake.model.training.watch.run_file import CHECKPOINTS_FOLDER

    with Checkpoints(run / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
        steps = checkpoints.steps()
    return f"goes on from step {steps[-1]}" if steps else "begins anew: there is no checkpoint yet (--checkpoint-every)"


def parse_mesh(text: str) -> tuple[int, ...]:
    """
    >>> parse_mesh("4x2"), parse_mesh("2x2x2")
    ((4, 2), (2, 2, 2))
    """
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"mesh={text!r} must be two or three numbers of devices: data x model, as in 4x2, or data x model x "
            f"sequence, as in 2x2x2"
        )
    return tuple(int(part) for part in parts)
