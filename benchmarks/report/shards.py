"""The tables of HADS over the shards of a sequence, from the recorded runs of `python -m benchmarks.hads.shards`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.hads.union_density import ORDERS, SHARDS
from benchmarks.hads.union_picture import title
from benchmarks.report.hads import FOLDER
from benchmarks.report.words import source, table

UNION, COST = "union-8192-64.json", "shards-8192-64.json"


def union() -> str:
    """What a shard needs, and what it receives, by the number of shards."""
    run = _read(UNION)
    by = {(title(line), line["shards"], line["order"]): line for line in run["results"]}
    masks = list(dict.fromkeys(map(title, run["results"])))
    heads = ["mask", *(f"{shards} shards" for shards in SHARDS)]

    def cells(share: str) -> list[list[str]]:
        return [
            [mask, *(" / ".join(f"{by[mask, n, order][share]['mean']:.0%}" for order in ORDERS) for n in SHARDS)]
            for mask in masks
        ]

    widest = max(SHARDS)
    room = {
        budget: [by[f"HADS {budget}", widest, "zigzag"]["sent"]["to_a_shard_for_a_layer"][x] for x in ("mean", "most")]
        for budget in ("43%", "20%", "10%")
    }
    rooms = ", ".join(f"{mean:.0%} and {most:.0%} with HADS {name}" for name, (mean, most) in room.items())
    return "\n".join(
        [
            "K/V blocks that a shard needs, as a share of those that its rows may attend, contiguous / zigzag:",
            "",
            *table(heads, cells("needed_of_allowed")),
            "",
            "K/V blocks that a shard would receive if only needed ones were sent, as a share of all that other shards "
            "hold, which is what all-gather and ring move:",
            "",
            *table(heads, cells("received_of_all")),
            "",
            f"Means over {_texts(run)}, all layers and KV heads. What one of "
            f"{widest} shards in zigzag receives in a layer, on average and at most: {rooms}. "
            + source(f"hads/{UNION}", run, "jax"),
        ]
    )


def cost() -> str:
    """KL and balance with equal counts for 8 shards."""
    run = _read(COST)
    lines = run["results"]
    budgets = list(dict.fromkeys(line["budget"] for line in lines))
    kinds = list(dict.fromkeys(line["equal_counts_for"] for line in lines))
    by = {(line["equal_counts_for"], line["budget"]): line for line in lines}

    def cell(kind: str, budget: float) -> str:
        line = by[kind, budget]
        order = kind if kind in ORDERS else None
        busiest = " / ".join(f"{line[f'busiest_shard_{o}']['most']:.2f}" for o in ([order] if order else ORDERS))
        return f"{line['kl']:.5f} ({line['kl_over_all_rows_together']:.2f}), {busiest}"

    names = {kind: f"equal counts, {kind}" if kind in ORDERS else kind for kind in kinds}
    return "\n".join(
        [
            "KL from dense attention in nats per token, in brackets over that of all rows together; then the blocks of "
            "the busiest of 8 shards over the mean, the most of all texts and layers (of all rows together for "
            "contiguous / zigzag shards):",
            "",
            *table(
                ["rows that compete", *(f"{b:.0%}" for b in budgets)],
                [[names[kind], *(cell(kind, budget) for budget in budgets)] for kind in kinds],
            ),
            "",
            f"{_texts(run)[0].upper() + _texts(run)[1:]}. " + source(f"hads/{COST}", run, "jax"),
        ]
    )


def _texts(run: dict[str, Any]) -> str:
    count = len(run["environment"]["settings"]["texts"])
    return "one text" if count == 1 else f"{count} texts"


def _read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())
