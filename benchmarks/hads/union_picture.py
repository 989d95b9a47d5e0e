"""The picture of `benchmarks.hads.union_density`: what a shard needs, over the number of shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

ORDERS = ("contiguous", "zigzag")
SHARES = {
    "needed_of_allowed": "needed by a shard,\n% of the K/V blocks that its rows may attend",
    "needed_of_all": "needed by a shard,\n% of all K/V blocks",
    "received_of_all": "received by a shard,\n% of the K/V blocks that other shards hold",
}
COLOURS = ("#e69f00", "#56b4e9", "#cc79a7", "black", "#0072b2", "#d55e00")
MOST_DENSITY = 0.8  # of a mask that is drawn: denser ones need all


def draw(lines: Sequence[dict[str, Any]], path: str | os.PathLike, most: float) -> None:
    """A panel per order and share; a line per mask, with the quartiles over layers and KV heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(10, 11), sharex=True, sharey=True, layout="constrained")
    lines = [line for line in lines if line["density"] < MOST_DENSITY]
    masks = list(dict.fromkeys(map(title, lines)))
    for row, share in enumerate(SHARES):
        for panel, order in zip(axes[row], ORDERS, strict=True):
            for number, mask in enumerate(masks):
                mine = [line for line in lines if title(line) == mask and line["order"] == order]
                means = [100 * line[share]["mean"] for line in mine]
                low, _, high = zip(*(line[share]["quartiles"] for line in mine), strict=True)
                spread = [
                    [max(m - 100 * x, 0) for m, x in zip(means, low, strict=True)],
                    [max(100 * x - m, 0) for m, x in zip(means, high, strict=True)],
                ]
                style = {"linestyle": "-" if mine[0]["mask"] == "hads" else ":", "color": COLOURS[number]}
                places = [k + 0.03 * (number - len(masks) / 2) for k in range(len(mine))]  # bars side by side
                panel.errorbar(places, means, spread, marker="o", capsize=3, label=mask, **style)
            if share == "needed_of_allowed":
                panel.axhline(100 * most, color="grey", linestyle="--", linewidth=1)
            panel.set(ylim=(0, 105))
            panel.grid(alpha=0.3)
            panel.set_xticks(range(len(mine)), [str(line["shards"]) for line in mine])
    for panel, words in zip(axes[:, 0], SHARES.values(), strict=True):
        panel.set_ylabel(words)
    for panel, order in zip(axes[0], ORDERS, strict=True):
        panel.set_title(order)
    for panel in axes[-1]:
        panel.set_xlabel("shards of the sequence")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def title(line: dict[str, Any]) -> str:
    if line["mask"] == "hads":
        return f"HADS {line['density']:.0%}"
    return f"sink {line['sink']} + window {line['window']}, {line['tokens'] // 1024}k tokens ({line['density']:.0%})"
