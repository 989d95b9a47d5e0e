"""The README's tables of HADS, made from the recorded study (`python -m benchmarks.hads`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.hads.methods import ABLATIONS, ORACLES, PUBLISHED, STRENGTHENED

FOLDER = record.RESULTS / "hads"
ALWAYS = ("sink_window", "oracle_top_k", "oracle_gain")
ORACLE_NAMES = {
    "oracle_top_k": "oracle: true masses, the same number for every row and head",
    "oracle_gain": "oracle: true masses, HADS's rule",
}

Row = dict[str, Any]


def hads_study() -> str:
    """Of each length and block that was studied; then the project's first table, and what masks cost."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("summary-*.json"), key=_longest_first)]
    parts = [study(run) if number == 0 else folded(run) for number, run in enumerate(found)]
    parts += [first_table(json.loads(path.read_text())) for path in sorted(FOLDER.glob("seed-*.json"))]
    if (record.RESULTS / "hads_mask_cost.json").exists():
        parts.append(mask_cost(record.load("hads_mask_cost")))
    return "\n\n".join(parts)


def study(run: dict[str, Any]) -> str:
    rows = [r for r in run["methods"] if r["layers"] == "profile" and r["budget"] in budgets_of(run)]
    budgets, by = budgets_of(run), {(r["method"], r["budget"]): r for r in rows}
    published, forced = ranked(rows, PUBLISHED), ranked(rows, STRENGTHENED)
    shown = ["hads", *forced[:3], *published[:3], *(name for name in ALWAYS if (name, budgets[0]) in by)]
    sequences = max(by[name, budgets[0]]["sequences"] for name in shown)
    lines = [
        f"{shape(run)}, {sequences} texts: KL divergence from dense attention, nats a token",
        "",
        f"| method | {' | '.join(f'{b:.0%}' for b in budgets)} |",
        f"| --- |{' --- |' * len(budgets)}",
    ]
    for name in dict.fromkeys(shown):
        own = by[name, budgets[0]]["sequences"]
        cells = " | ".join(cell(by.get((name, b)), own) for b in budgets)
        lines.append(f"| {title(name)}{'' if own == sequences else f' ({own} texts)'} | {cells} |")
    rivals = [r for r in rows if r["method"] in PUBLISHED or r["method"] in STRENGTHENED]
    lines += ["", *facts(by, budgets, published, forced, rivals)]
    lines += [f"- From `benchmarks/results/hads/`: {machine(run)}.", *answers(run["tasks"])]
    return "\n".join(lines)


def folded(run: dict[str, Any]) -> str:
    return f"<details><summary>{shape(run)}</summary>\n\n{study(run)}\n\n</details>"


def shape(run: dict[str, Any]) -> str:
    return f"{run['about']['length']} tokens, blocks of {run['about']['block']}"


def machine(run: dict[str, Any]) -> str:
    e = run["environment"]
    return f"{e['device']}, jax {e['versions']['jax']}, commit {e['commit'][:7]}"


def cell(row: Row | None, sequences: int) -> str:
    """KL, and the number of texts where it is not the row's."""
    if row is None:
        return ""
    return f"{row['kl']:.4f}" + (f" ({row['sequences']} texts)" if row["sequences"] != sequences else "")


def facts(
    by: dict[tuple[str, float], Row],
    budgets: Sequence[float],
    published: Sequence[str],
    forced: Sequence[str],
    rivals: Sequence[Row],
) -> list[str]:
    below = [r for r in rivals if r["against"] is not None and r["against"]["high"] < 0]
    others = [f"{plain(r['method'])} at {r['budget']:.0%}" for r in rivals if r not in below]
    exceptions = f" Not so: {', '.join(others)}." if others else ""
    names = {r["method"] for r in rivals}

    def over(best: Sequence[str]) -> str:
        """On the texts that both have read: the difference is paired by text."""
        shares = (
            max(1 + by[name, b]["against"]["mean"] / by[name, b]["kl"] for name in best if (name, b) in by)
            for b in budgets
        )
        return " / ".join(f"{share:.2f}" for share in shares)

    gaps = " / ".join(f"{by['hads', b]['perplexity_gap']:+.2%}" for b in budgets)
    off = max(r["off_budget"] for r in by.values())
    return [
        f"- {len(names)} methods (as published, and with HADS's sink, previous and diagonal blocks always on) at "
        f"{len(budgets)} budgets: in {len(below)} of {len(rivals)} comparisons the 95% interval of HADS's KL minus the "
        f"method's, paired by text, is below 0.{exceptions}",
        f"- HADS's KL over that of the best method as published, by budget: {over(published)}; with our forced blocks: "
        f"{over(forced)}.",
        f"- Perplexity of HADS over dense: {gaps}. Active blocks off the budget, any text and method: {off:.2%}.",
    ]


def answers(tasks: Sequence[Row]) -> list[str]:
    """What is kept of the answers that the dense model gets right."""
    budgets = sorted({t["budget"] for t in tasks})
    names = list(dict.fromkeys(t["domain"] for t in tasks))
    if not tasks:
        return []
    by = {(t["method"], t["domain"], t["budget"]): t["retention"] for t in tasks}
    asked = {t["domain"]: t["asked"] for t in tasks}
    heads = [f"{name.split('-')[0]} ({asked[name]}) at {b:.0%}" for name in names for b in budgets]
    lines = [
        "",
        "Answers kept, of those that the dense model gets right (how many):",
        "",
        f"| method | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(heads)}",
    ]
    for method in dict.fromkeys(t["method"] for t in tasks):
        cells = " | ".join(f"{by[method, name, b]:.0%}" for name in names for b in budgets)
        lines.append(f"| {title(method)} | {cells} |")
    return lines


def first_table(run: dict[str, Any]) -> str:
    """Patterns at the unequal shares of blocks that the project's first table gave them, and all at HADS's."""
    lines = [
        "The table that this project began with, made again: at its unequal shares of blocks, then at equal ones",
        "",
        "| method | active blocks | choosing blocks, ms | attention, ms | KL | perplexity |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in run["results"]:
        times = f"{r['mask_ms']:.2f} | {r['attention_ms']:.2f}"
        lines.append(
            f"| {r['method']} | {r['active_blocks']:.0%} | {times} | {r['kl']:.4f} | {r['perplexity_gap']:+.2%} |"
        )
    lines += [
        "",
        f"Times are of a sequence in all layers. {machine(run)}.",
    ]
    return "\n".join(lines)


def mask_cost(run: dict[str, Any]) -> str:
    """Choosing blocks and attention, beside dense attention, by length and budget."""
    by = {(r["length"], r["what"]): r["seconds"]["median"] for r in run["results"]}
    lines = [
        "What a mask costs beside the attention that it saves (blocks of 64, 32 query heads on 8, head_dim 128)",
        "",
        "| tokens, budget | dense (cuDNN) | HADS mask alone | of dense | of sparse attention | mask and attention "
        "| faster | what the mask adds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for length, what in sorted(by, key=lambda at: -at[0]):
        if not what.startswith("mask: hads at "):
            continue
        budget = what.removeprefix("mask: hads at ")
        dense, mask = by[length, "dense"], by[length, what]
        sparse, both = by[length, f"attention: hads at {budget}"], by[length, f"mask and attention: hads at {budget}"]
        cells = [f"{length}, {budget}", f"{1e3 * dense:.2f} ms", f"{1e3 * mask:.2f} ms", f"{mask / dense:.1%}"]
        cells += [f"{mask / sparse:.0%}", f"{1e3 * both:.2f} ms", f"{dense / both:.2f}x"]
        cells.append(f"{1e3 * (both - sparse):.2f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"From `benchmarks/results/hads_mask_cost.json`: {machine(run)}."]
    return "\n".join(lines)


def ranked(rows: Sequence[Row], among: Any) -> list[str]:
    """Best first, by the mean over budgets of the logarithm of KL."""
    logs: dict[str, list[float]] = {}
    for r in rows:
        if r["method"] in among:
            logs.setdefault(r["method"], []).append(float(np.log(r["kl"])))
    return sorted(logs, key=lambda name: float(np.mean(logs[name])))


def budgets_of(run: dict[str, Any]) -> list[float]:
    """Those at which methods were compared; not what only the first table asks for."""
    return sorted({r["budget"] for r in run["methods"] if r["method"] == "oracle_gain"})


def title(name: str) -> str:
    if name == "hads":
        return "**HADS**"
    if name in ORACLES:
        return ORACLE_NAMES.get(name, name)
    assert name not in ABLATIONS
    return plain(name)


def plain(name: str) -> str:
    return f"{name.removesuffix('+forced')}, with our forced blocks" if name.endswith("+forced") else name


def _longest_first(path: Any) -> tuple[int, int]:
    _, length, block = path.stem.split("-")
    return -int(length), int(block)
