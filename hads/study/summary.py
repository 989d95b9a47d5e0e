"""From records to a summary: means over sequences, and whether HADS differs from each method."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from xsake.hads.study.bootstrap import Difference, holm, paired_difference


class Summary(NamedTuple):
    """One method at one budget over all its sequences."""

    method: str
    budget: float
    layers: str
    sequences: int
    documents: int  # that the sequences come from; records that name none count each sequence as one
    density: float  # active blocks as a share of the causal blocks, mean over sequences
    off_budget: float  # how far any sequence's density is from the budget, as a share of the budget
    kl: float  # nats per token, mean over sequences
    perplexity_gap: float  # perplexity over that of the dense model, minus 1
    same_token: float
    against: Difference | None  # KL of HADS minus this method's; None for HADS itself, or without common sequences
    adjusted: float | None  # probability that HADS is not better, corrected for the number of comparisons
    loss_against: Difference | None = None  # loss (log perplexity) of HADS minus this method's, on the same sequences


def with_last_rows(lines: Iterable[dict[str, Any]], last_rows: str) -> list[dict[str, Any]]:
    """The lines of one setting of `MethodMask.last_rows`; lines of older records, which do not name it, are "own"."""
    return [line for line in lines if line.get("last_rows", "own") == last_rows]


def summarise(lines: Iterable[dict[str, Any]], last_rows: str = "own") -> list[Summary]:
    """One row for each method, budget and division among layers, best KL first within a budget.

    A method is compared with HADS at the same budget and division, on the sequences that both have read.
    """
    groups: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for line in with_last_rows(lines, last_rows):
        if "asked" in line:  # a text that asks something is not natural text
            continue
        groups[line["budget"], line["layers"], line["method"]][line["sequence"]] = line
    differences: dict[tuple, Difference] = {}
    losses: dict[tuple, Difference] = {}
    for key, mine in groups.items():
        budget, layers, method = key
        ours = groups.get((budget, layers, "hads"), {})
        both = sorted(set(mine) & set(ours))
        if method != "hads" and both:
            documents = [_document(mine[name]) for name in both]
            for what, found in (("kl", differences), ("sparse_loss", losses)):
                a, b = (np.array([group[name][what] for name in both]) for group in (ours, mine))
                found[key] = paired_difference(a, b, documents)
    adjusted = dict(zip(differences, holm(np.array([d.not_below for d in differences.values()])), strict=True))

    rows = []
    for key, mine in groups.items():
        budget, layers, method = key
        values = list(mine.values())
        density = np.array([line["density"] for line in values])
        gap = float(np.mean([line["sparse_loss"] - line["loss"] for line in values]))
        rows.append(
            Summary(
                method,
                budget,
                layers,
                len(values),
                len(set(map(_document, values))),
                float(density.mean()),
                float(np.abs(density / budget - 1).max()),
                float(np.mean([line["kl"] for line in values])),
                math.expm1(gap),
                float(np.mean([line["same_token"] for line in values])),
                differences.get(key),
                float(adjusted[key]) if key in adjusted else None,
                losses.get(key),
            )
        )
    return sorted(rows, key=lambda row: (row.layers, row.budget, row.kl))


def _document(line: dict[str, Any]) -> str:
    return line.get("document", line["sequence"])


Share = tuple[str, str, float, int, float]  # domain, method, budget, how many there are, and a share of them


def retention(lines: Iterable[dict[str, Any]], last_rows: str = "own") -> list[Share]:
    """The items that the dense model answers, and the share of these that the sparse one answers."""
    return _shares(with_last_rows(lines, last_rows), "dense_right", "both_right")


def dropped(lines: Iterable[dict[str, Any]], last_rows: str = "own") -> list[Share]:
    """The blocks that answers hang on (`carried`), and the share of these that the masks leave out."""
    return _shares(with_last_rows(lines, last_rows), "carriers", "dropped")


def _shares(lines: Iterable[dict[str, Any]], whole: str, part: str) -> list[Share]:
    sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for line in lines:
        if whole in line:
            one = sums[line["domain"], line["method"], line["budget"]]
            one[0] += line[whole]
            one[1] += line[part]
    return [(*key, total, some / total) for key, (total, some) in sums.items() if total]


def layer_division(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """KL with the profile's division of the budget among layers and with equal shares, on the sequences that have both:
    one entry per method and budget."""
    found: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in with_last_rows(lines, "own"):
        if "asked" not in line:
            found[line["method"], line["budget"]][line["sequence"]][line["layers"]] = line["kl"]
    made = []
    for (method, budget), by in found.items():
        both = [of for of in by.values() if len(of) == 2]
        if both:
            means = {layers: float(np.mean([of[layers] for of in both])) for layers in ("profile", "uniform")}
            made.append({"method": method, "budget": budget, "sequences": len(both), **means})
    return made


def as_json(about: dict[str, Any], rows: Iterable[Summary], kept: Iterable[Share]) -> dict[str, Any]:
    """The contents of a summary file."""
    names = ("domain", "method", "budget", "asked", "retention")

    def read(row: Summary) -> dict[str, Any]:
        return {name: of._asdict() if isinstance(of, Difference) else of for name, of in row._asdict().items()}

    return {
        "about": about,
        "methods": [read(row) for row in rows],
        "tasks": [dict(zip(names, one, strict=True)) for one in kept],
    }
