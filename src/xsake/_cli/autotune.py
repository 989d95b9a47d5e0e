"""`xsake autotune`: find the fastest configurations on this device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from xsake._cli.errors import plain_errors
from xsake._cli.options import SHAPE, duration

_OF_TUNING = (
    "--workloads",
    "--from-call",
    "--calls",
    "--densities",
    "--blocks",
    "--dtype",
    "--implementation",
    "--report",
)
_NOT_OF_HADS = (
    "--workloads",
    "--from-call",
    "--calls",
    "--blocks",
    "--implementation",
    "--trials",
    "--storage",
    "--report",
    "--seed",
    "--refresh",
)
_DENSITIES, _BUDGETS = "1,0.5,0.43,0.25,0.1", "0.1,0.2,0.43"


def _densities(text: str) -> list[float]:
    try:
        densities = [float(x) for x in text.split(",")]
    except ValueError:
        densities = [0.0]
    if not all(0 < x <= 1 for x in densities):
        raise ValueError(f"--densities {text!r} must be numbers above 0 and at most 1, separated by commas")
    return densities


def _blocks(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"--blocks {text!r} must be whole numbers, separated by commas")
    return [int(x) for x in text.split(",")]


def _check_together(given: dict[str, object]) -> None:
    """Refuse an option whose value another option gives, rather than ignore it."""
    told = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    sources = [option for option in ("--workloads", "--from-call", "--calls") if option in told]
    if len(sources) > 1:
        raise ValueError(f"give one of --workloads, --from-call and --calls; got {' and '.join(sources)}")
    if given.get("refresh") and (other := [o for o in told if o in _OF_TUNING]):
        raise ValueError(f"--refresh races what is in the database: leave out {' and '.join(other)}")
    if given.get("hads") and (other := [o for o in told if o in _NOT_OF_HADS]):
        raise ValueError(f"--hads races the calls of HADS's models: leave out {' and '.join(other)}")
    if given.get("profile") and not given.get("hads"):
        raise ValueError("--profile is for --hads: give both")
    own = {"--from-call": ("--blocks",), "--calls": ("--blocks", "--densities", "--dtype", "--implementation")}
    for source in sources:
        if twice := [option for option in own.get(source, ()) if option in told]:
            raise ValueError(f"{source} says that itself: leave out {' and '.join(twice)}")


def autotune(
    context: typer.Context,
    workloads: Annotated[str, typer.Option(help="Comma-separated workloads; by default this device's set.")] = "",
    from_call: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Shapes instead: {SHAPE}, such as 1x4096x32x128,kv=4096x8,causal,density=0.25. "
            "May be given several times."
        ),
    ] = None,
    calls: Annotated[Path | None, typer.Option(help="A recording by `xsake.autotune.record_calls` instead.")] = None,
    densities: Annotated[str, typer.Option(help=f"Densities of the masks; by default {_DENSITIES}.")] = "",
    blocks: Annotated[str, typer.Option(help="Mask blocks of named workloads; by default this device's set.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; by default this device's usual one.")] = "",
    implementation: Annotated[
        str, typer.Option(help="A backend, or its file; by default the best that serves the calls.")
    ] = "",
    budget: Annotated[
        str,
        typer.Option(help="Total time, such as 90s, 5m or 1h; its last step may take a tenth more."),
    ] = "5m",
    trials: Annotated[int, typer.Option(help="Configurations to try per study, at most.", min=1)] = 1000,
    out: Annotated[Path | None, typer.Option(help="Folder of the database; by default the user's own.")] = None,
    storage: Annotated[
        str, typer.Option(help="Optuna storage: a journal file or a URL (sqlite:///, postgresql://).")
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Folder for a report with plots.")] = None,
    limit: Annotated[str, typer.Option(help="Time after which a configuration counts as hanging.")] = "60s",
    seed: Annotated[int, typer.Option(help="Seed of the sampler.", min=0, max=2**32 - 1)] = 0,
    isolate: Annotated[bool, typer.Option(help="Measure in a separate process, which may hang or crash.")] = True,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="Race the entries of an earlier driver, JAX or kernel again, and tune nothing."),
    ] = False,
    hads: Annotated[
        bool,
        typer.Option(
            "--hads",
            help="Race sparse and dense attention instead: where does HADS pay on this device? --densities are its "
            "budgets, by default 0.1,0.2,0.43.",
        ),
    ] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --hads: race in a model of this profile, instead of those that come with xsake. May be given "
            "several times.",
            exists=True,
        ),
    ] = None,
) -> None:
    """Find the fastest configurations on this device, check their numbers, and write them to the tuning database."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    with plain_errors("tune"):
        _check_together({name: x for name, x in context.params.items() if "DEFAULT" not in str(sources[name])})
        from xsake._measure.isolation import Failed, reason
        from xsake.autotune import command
        from xsake.autotune.search.direction import Settings

        try:
            if hads:
                from xsake.autotune.hads import command as of_hads

                settings = Settings(budget=duration(budget), limit=duration(limit))
                budgets = _densities(densities or _BUDGETS)
                where: dict[str, Any] = dict(dtype=dtype or None, out=out, isolate=isolate)
                exit_code = of_hads.run(profiles=profile or [], budgets=budgets, settings=settings, **where)
            elif refresh:
                exit_code = command.refresh(out=out, isolate=isolate)
            else:
                exit_code = command.run(
                    workloads=workloads.split(",") if workloads else None,
                    from_call=from_call or [],
                    calls=calls,
                    densities=_densities(densities or _DENSITIES),
                    blocks=_blocks(blocks) if blocks else None,
                    dtype=dtype or None,
                    implementation=implementation or None,
                    settings=Settings(budget=duration(budget), trials=trials, limit=duration(limit), seed=seed),
                    out=out,
                    storage=storage or None,
                    report_folder=report,
                    isolate=isolate,
                )
        except Failed as failed:
            raise ValueError(reason(failed)) from failed
    raise typer.Exit(exit_code)
