"""Needles by depth and length: a heat map per way of reading, side by side, from a file of records.

python -m benchmarks.ruler.picture records.jsonl --out needles.png
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ruler.tasks import NEEDLE, NEEDLE_DEPTHS
from benchmarks.ruler.way import Way
from xsake._ground.words import in_words, model
from xsake.hads.study.records import read

_COLUMNS = 4


def needle_scores(lines: Iterable[dict[str, Any]]) -> tuple[list[int], dict[Way, np.ndarray]]:
    """(lengths, for each way the mean scores [depths, lengths] in percent; NaN where there is no answer)."""
    found: dict[Way, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["task"] == NEEDLE:
            depth = int(line["sequence"].split("/")[0].split("@")[1])
            found[Way(line["method"], line["budget"])][depth, line["length"]].append(100 * line["score"])
    lengths = sorted({length for of in found.values() for _, length in of})
    return lengths, {
        way: np.array(
            [
                [np.mean(of[at]) if (at := (depth, length)) in of else np.nan for length in lengths]
                for depth in NEEDLE_DEPTHS
            ]
        )
        for way, of in found.items()
    }


def draw(lines: Iterable[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths, scores = needle_scores(lines)
    if not scores:
        raise ValueError(f"the records hold no needles by depth: run with --tasks {NEEDLE}")
    rows = -(-len(scores) // _COLUMNS)
    columns = min(len(scores), _COLUMNS)
    size = (1.8 + columns * (1.2 + 0.45 * len(lengths)), 0.8 + 3.6 * rows)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for axes in grid.flat[len(scores) :]:
        axes.set_axis_off()
    for axes, (way, found) in zip(grid.flat, scores.items(), strict=False):
        image = axes.imshow(found, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set_title(f"{_words(way)}\n{np.nanmean(found):.0f}% found", fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length / 1024:g}k" for length in lengths])
        axes.set_yticks(range(len(NEEDLE_DEPTHS)), [str(depth) for depth in NEEDLE_DEPTHS])
    for axes in grid[:, 0]:
        axes.set_ylabel("depth of the needle (%)")
    for axes in grid.flat[len(scores) - columns : len(scores)]:  # the lowest of each column
        axes.set_xlabel("tokens")
        axes.tick_params(labelbottom=True)
    figure.colorbar(image, ax=grid, label="needles found (%)")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _words(way: Way) -> str:
    return "dense" if way.method == "dense" else f"{in_words(way.method)}, {way.budget:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    about, lines = read(args.records)
    draw(lines, args.out, f"{model(about['model'])}: a needle by depth and length")
    print(args.out)


if __name__ == "__main__":
    main()
