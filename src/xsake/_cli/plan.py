"""`xsake plan`: time and memory of a step on many devices, predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from xsake._cli.errors import plain_errors
from xsake._cli.options import check_file_out, named_as

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from xsake._plan.plan import Plan
    from xsake._plan.predict import Prediction


def plan(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.")],
    devices: Annotated[int, typer.Option(help="How many devices.")],
    model: Annotated[
        str,
        typer.Option(
            help="tiny, small, gpt2-124m, smollm2-135m, llama-1b, llama-8b, llama-70b, qwen2.5-1.5b, qwen2.5-7b, or a "
            "JSON file with the fields of ModelConfig."
        ),
    ],
    device: Annotated[str, typer.Option(help="Which device: h200, h100, tpu-v5e or tpu-v6e.")] = "h200",
    density: Annotated[float, typer.Option(help="Active blocks over the causal rule's blocks; 1 is dense.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Sequences per step, over all devices.")] = 8,
    prefill: Annotated[bool, typer.Option(help="Plan a prefill (a forward alone) instead of a training step.")] = False,
    hads: Annotated[bool, typer.Option(help="HADS chooses the blocks of the prefill, which takes time.")] = False,
    block: Annotated[int, typer.Option(help="Tokens per mask block.")] = 128,
    mesh: Annotated[str | None, typer.Option(help="Only this mesh, data x model x sequence, such as 8x1x8.")] = None,
    union: Annotated[
        float, typer.Option(help="For sparse: the share of the others' K and V that a device's rows list.")
    ] = 0.6,
    fsdp: Annotated[
        str, typer.Option(help="Split weights and optimiser over all devices, over the data axis, or none.")
    ] = "all",
    remat: Annotated[
        str, typer.Option(help="Recompute activations: auto (where they do not fit), yes or no.")
    ] = "auto",
    mfu: Annotated[
        float | None, typer.Option(help="Share of the peak of all work beside attention; by default as recorded.")
    ] = None,
    overlap: Annotated[float, typer.Option(help="Share of the communication that could hide and does.")] = 0.8,
    imbalance: Annotated[float, typer.Option(help="Blocks of the busiest device over the mean.")] = 1.02,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, repeated: GB/s per device and direction of inside, hop, outside; devices per domain; "
            "reach (a share); latency (microseconds)."
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Meshes to list.", min=0)] = 8,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
) -> None:
    """Predict a training step on devices that are not here: the best mesh and exchange of K and V, time and memory.

    Meshes are data x model x sequence. Over data, devices have different sequences; over model, different heads; over
    sequence, different tokens of one sequence, whose K and V they exchange:

    - none: the sequence is on one device. gather: all K and V, a few heads at a time. ring: K and V travel from device
    to device. sparse: only the blocks that are listed; a what-if, whose gain depends on the masks.

    This is arithmetic with recorded speeds of kernels and stated speeds of links, not a measurement. All that it
    assumes is printed below the tables, and most of it can be set.

    Example: xsake plan --tokens 1048576 --devices 64 --device h200 --model llama-8b --density 0.1
    """
    with plain_errors():
        import dataclasses
        from json import dumps

        from rich.console import Console

        from xsake._ground import atomic
        from xsake._plan.devices import find_device, override_links
        from xsake._plan.meshes import parse_mesh
        from xsake._plan.models import find_model
        from xsake._plan.plan import make_plan
        from xsake._plan.question import Question
        from xsake._plan.report import plan_values

        if remat not in ("auto", "yes", "no"):
            raise ValueError(f"remat={remat!r} must be auto, yes or no")
        if json is not None:
            check_file_out(json)
        found = find_device(device)
        changed: dict[str, Any] = dict(
            config=find_model(model),
            device=dataclasses.replace(found, links=override_links(found.links, link or [])),
            remat=None if remat == "auto" else remat == "yes",
        )
        question = Question(**named_as(Question, context.params) | changed)
        made = make_plan(question, None if mesh is None else parse_mesh(mesh))
        _show(made, model, top, Console())
        if json is not None:
            atomic.write_text(json, dumps({"model": model} | plan_values(made), indent=1) + "\n")
            typer.echo(f"all numbers: {json}")


def _show(plan: Plan, model: str, top: int, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from xsake._plan.assumptions import assumptions
    from xsake._plan.exchanges import EXCHANGES, WHAT_IF

    q = plan.question
    what = "a prefill" if q.prefill else "a training step"
    console.print(
        f"[bold]Predicted, not measured[/bold]: {what} of {model} ({q.config.param_count() / 1e9:.2f}B parameters), "
        f"{q.batch} x {q.tokens} tokens, density {q.density:g}, on {q.devices} {q.device.name}"
    )
    unit = ("s", 1.0) if plan.predictions[0].seconds >= 1 else ("ms", 1e3)
    best = _table(f"The best mesh (data x model x sequence) of each exchange, in {unit[0]}", q.hads)
    for exchange in EXCHANGES:
        prediction = plan.best_of(exchange)
        best.add_row(exchange, *(["no mesh can"] if prediction is None else _cells(prediction, unit[1])))
    console.print(best)
    if top:
        shown = plan.predictions[:top]
        meshes = _table(f"Meshes, the best first: {len(shown)} of {len(plan.predictions)}, in {unit[0]}", q.hads)
        for prediction in shown:
            meshes.add_row(prediction.exchange, *_cells(prediction, unit[1]))
        console.print(meshes)
    if any(p.exchange == WHAT_IF for p in plan.predictions):
        console.print(f"{WHAT_IF} is a what-if: {q.union:.0%} of the others' blocks travel (--union)")
    if plan.best is None:
        console.print(
            "[bold]Best: none.[/bold] No mesh has the memory; more devices, fewer tokens or another --fsdp may."
        )
    else:
        _show_best(plan, plan.best, console)
    console.print("\n[bold]Assumptions[/bold]")
    listed = Table.grid(padding=(0, 1))
    for number, text in enumerate(assumptions(plan), 1):
        listed.add_row(f"{number}.", Text(text))
    console.print(listed)


def _show_best(plan: Plan, best: Prediction, console: Console) -> None:
    from xsake._plan.report import tokens_per_second

    console.print(
        f"[bold]Best: {best.exchange} on {best.mesh}[/bold], {_seconds(best.seconds)}, "
        f"{tokens_per_second(plan, best):,.0f} tokens per second and device"
    )
    shares = ", ".join(f"{name} {share:.0%}" for name, share in best.shares.items())
    console.print(f"  the time goes to: {shares}", highlight=False)
    names = {"exchange": "exchange of K and V", "model": "sums over model", "weights": "weights and gradients"}
    for name, part in best.traffic.items():
        if part.bytes:
            console.print(
                f"  {names[name]}: a device receives {_bytes(part.bytes)} in {_seconds(part.seconds)}, of which "
                f"{_seconds(part.hidden)} hidden",
                highlight=False,
            )
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in best.memory.items() if size)
    console.print(f"  memory per device: {parts}", highlight=False)
    if best.other_memory is not None:
        console.print(
            f"  {'without' if best.remat else 'with'} rematerialisation it would be {_bytes(best.other_memory)}",
            highlight=False,
        )


def _table(title: str, hads: bool) -> Table:
    from rich import box
    from rich.table import Table

    # A space between columns, so that 80 characters hold them all.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in ("exchange", "mesh"):
        table.add_column(name, no_wrap=True)
    choice = ["choice"] if hads else []
    for name in ("time", "attention", *choice, "other\nwork", "exposed", "hidden", "memory", "remat", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(p: Prediction, times: float) -> list[str]:
    choice = [p.choice] if p.choice else []
    seconds = [f"{s * times:.2f}" for s in (p.seconds, p.attention, *choice, p.matmuls, p.exposed, p.hidden)]
    return [str(p.mesh), *seconds, _bytes(p.total_memory), "yes" if p.remat else "no", "yes" if p.fits else "no"]


def _seconds(seconds: float) -> str:
    """
    >>> _seconds(52.341), _seconds(0.0123), _seconds(0.0)
    ('52.3 s', '12.3 ms', '0 s')
    """
    if not seconds:
        return "0 s"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _bytes(size: float) -> str:
    """
    >>> _bytes(141e9), _bytes(2.5e6)
    ('141.0 GB', '2.5 MB')
    """
    return decimal(round(size))
