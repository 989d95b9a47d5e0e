"""`xsake plan` on one page: its example, and its predictions beside recorded training steps."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from benchmarks.report.words import section, table
from xsake._plan.devices import DEVICES
from xsake._plan.exchanges import EXCHANGES
from xsake._plan.meshes import Mesh
from xsake._plan.models import MODELS
from xsake._plan.plan import make_plan
from xsake._plan.predict import predict
from xsake._plan.question import Question
from xsake._plan.rates import Prompt, Rest, rest_rate, shipped_points, shipped_prompts, shipped_rest


def example() -> str:
    """The best mesh of each exchange, for the command that the page shows."""
    question = Question(
        config=MODELS["llama-8b"], device=DEVICES["h200"], devices=64, tokens=1048576, density=0.1, batch=8
    )
    plan = make_plan(question)
    rows = []
    for exchange in EXCHANGES:
        if (p := plan.best_of(exchange)) is not None:
            times = (f"{seconds:.1f} s" for seconds in (p.seconds, p.attention, p.matmuls, p.exposed, p.hidden))
            memory = f"{p.total_memory / 1e9:.0f} GB" + ("" if p.fits else ": too much")
            what_if = f", if {question.union:.0%} of the blocks travel" if exchange == "sparse" else ""
            rows.append([exchange + what_if, str(p.mesh), *times, memory])
    heads = ["exchange", "best mesh", "step", "attention", "other work", "exposed", "hidden", "memory per device"]
    best = plan.best
    assert best is not None
    return section(table(heads, rows), f"Predicted, not measured. The best that fits: {best.exchange} on {best.mesh}.")


def predicted_step(run: Rest, others: list[Rest]) -> float:
    """The seconds of a recorded step, predicted from other recorded steps and the throughputs of attention."""
    question = Question(
        config=MODELS[run.model],
        device=next(d for d in DEVICES.values() if d.kind == run.device),
        devices=1,
        tokens=run.length,
        density=run.density,
        batch=run.batch,
    )
    rest = rest_rate(others, width=run.width)
    return predict(question, Mesh(1, 1, 1), "none", remat=False, points=shipped_points(), rest=rest).seconds


def checks() -> list[tuple[Rest, float]]:
    """Each recorded step with block-sparse attention, and what the other steps of its model predict for it."""
    runs = shipped_rest()
    return [
        (run, predicted_step(run, [r for r in runs if r.model == run.model and r != run]))
        for run in runs
        if run.attention == "sparse"
    ]


def predicted_prompt(run: Prompt, others: list[Prompt]) -> float:
    """The seconds of a recorded prompt, by the throughputs of attention and what other prompts took beside it."""
    config = dataclasses.replace(MODELS[run.model], layers=run.layers)
    device = next(d for d in DEVICES.values() if d.kind == run.device)
    asked: dict[str, Any] = dict(devices=1, tokens=run.length, density=run.density, batch=1, prefill=True, hads=True)
    question = Question(config=config, device=device, **asked)
    rest = rest_rate(others, width=run.width)
    return predict(question, Mesh(1, 1, 1), "none", remat=False, points=shipped_points(), rest=rest).seconds


def prompt_checks() -> list[tuple[Prompt, float]]:
    """Each recorded prompt that HADS read, and what the model's other prompts predict for it."""
    runs = shipped_prompts()
    return [(run, predicted_prompt(run, [r for r in runs if r.model == run.model and r != run])) for run in runs]


def long_prompts() -> str:
    """The best plan of one prompt of a million tokens and of ten, on growing numbers of devices."""
    rows = []
    for tokens, devices in itertools.product((1 << 20, 10 << 20), (8, 32, 128, 256)):
        asked: dict[str, Any] = dict(devices=devices, tokens=tokens, density=0.05, batch=1, prefill=True, hads=True)
        best = make_plan(Question(config=MODELS["llama-8b"], device=DEVICES["h200"], **asked)).best
        found = ["none fits", "", "", ""]
        if best is not None:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in best.shares.items())
            found = [
                f"{best.exchange} on {best.mesh}",
                f"{best.seconds:.1f} s",
                shares,
                f"{best.total_memory / 1e9:.0f} GB",
            ]
        rows.append([f"{tokens:,}", str(devices), *found])
    heads = ["tokens", "devices", "best", "to the first token", "the time goes to", "memory per device"]
    return section(table(heads, rows), "Predicted, not measured.")


def check() -> str:
    heads = ("tokens per sequence", "active blocks", "recorded step")
    return _checked(heads, [(run.model, run, seconds) for run, seconds in checks()])


def check_prompts() -> str:
    heads = ("tokens", "HADS's blocks", "recorded")
    return _checked(heads, [(f"{run.model}, {run.layers} layers", run, seconds) for run, seconds in prompt_checks()])


def _checked(heads: tuple[str, ...], found: list[tuple[str, Any, float]]) -> str:
    """A line for each recorded run, by its model's words, and the seconds that are predicted for it."""
    rows = [
        [
            model,
            str(run.length),
            f"{run.density:.0%}",
            f"{run.seconds * 1e3:.0f} ms",
            f"{seconds * 1e3:.0f} ms",
            f"{seconds / run.seconds:.2f}",
        ]
        for model, run, seconds in found
    ]
    run = found[0][1]
    return section(
        table(["model", *heads, "predicted", "predicted over recorded"], rows),
        f"Recorded in `benchmarks/results/{run.record}.json`: one {run.device}.",
    )
