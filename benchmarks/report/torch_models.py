"""A model of transformers on torch that attends by xsake, beside torch's own attention and the same model in JAX."""

from __future__ import annotations

from typing import Any

from benchmarks.report.words import Row, Run, facts, grid, median, ms, section, span, times

TORCH, COMPILED = "torch", "torch, parts compiled"


def gpu_torch_models() -> str:
    run = Run.load("gpu_torch_models")
    by = {row["race"]: row for row in run.results}
    titles = {
        "prompt": "first token of {} tokens (of JAX's)",
        "layer": "forward of {} tokens (more than sdpa's, per layer)",
        "training": "gradient of {} tokens (of JAX's)",
    }
    columns = {race: titles[race].format(row["length"]) for race, row in by.items()}
    ways = {way: way.split(": ") for row in run.results for way in row["seconds"]}

    def cell(way: str, race: str) -> str:
        if way not in by[race]["seconds"]:
            return ""
        seconds, (how, who) = median(by[race], way), ways[way]
        more = _per_layer(by[race], how, who) if race == "layer" else _of_jax(by[race], how, who)
        return ms(seconds, 1) + (f" ({more})" if more else "")

    return section(
        grid(("model in", "attention"), ways, columns, cell),
        facts(
            _read(by["prompt"]),
            f"A call of {by['layer']['length']} tokens takes {span(_costs(by['layer']), '{:.0f}')} us more than "
            "sdpa's, which is the host's time: the chip waits for it.",
            _learned(by["training"]),
        ),
        run.source("jax", "torch", note=f"transformers {run.content['environment']['transformers']}"),
    )


def _of_jax(row: Row, how: str, who: str) -> str:
    own = row["seconds"].get(f"JAX: {who}")
    return "" if own is None or how == "JAX" else times(median(row, f"{how}: {who}") / own["median"])


def _per_layer(row: Row, how: str, who: str) -> str:
    if who == "sdpa":
        return ""
    return f"{(median(row, f'{how}: {who}') - median(row, f'{how}: sdpa')) / row['layers'] * 1e6:.0f} us"


def _ratios(row: Row, how: str) -> list[float]:
    own = {way.removeprefix("JAX: "): time["median"] for way, time in row["seconds"].items() if way.startswith("JAX")}
    return [median(row, f"{how}: {who}") / seconds for who, seconds in own.items()]


def _costs(row: Row) -> list[Any]:
    pairs = [way.split(": ") for way in row["seconds"]]
    found = [(median(row, f"{how}: {who}") - median(row, f"{how}: sdpa")) for how, who in pairs if who != "sdpa"]
    return [seconds / row["layers"] * 1e6 for seconds in found]


def _read(row: Row) -> str:
    return (
        f"With its norms, feed-forward networks and rotary positions compiled, torch reads the prompt in "
        f"{span(_ratios(row, COMPILED), '{:.2f}x')} of JAX's time; operation by operation, in "
        f"{span(_ratios(row, TORCH), '{:.2f}x')}."
    )


def _learned(row: Row) -> str:
    sdpa = median(row, f"{COMPILED}: sdpa") / median(row, "JAX: xsake")
    return (
        f"A gradient takes {span(_ratios(row, COMPILED), '{:.2f}x')} of JAX's time with these parts compiled; with "
        f"torch's own attention {sdpa:.2f}x of JAX's dense one."
    )
