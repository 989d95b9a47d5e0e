"""The picture of the recorded GPU run: throughput, and speed-up over dense attention, over density."""

from __future__ import annotations

import matplotlib.pyplot as plt

from benchmarks import record
from xsake._ground.words import call, kernel

COLOURS = {"xsake": "#0072b2", "flex": "#d55e00", "cudnn": "grey"}


def draw() -> None:
    run = record.load("gpu_attention")
    results = [r for r in run["results"] if "asked" in r and r["implementation"] in COLOURS]
    workloads = list(dict.fromkeys(r["workload"] for r in results))
    directions = list(dict.fromkeys(r["direction"] for r in results))
    figure, axes = plt.subplots(
        4, len(workloads), figsize=(3.4 * len(workloads), 11), sharex=True, layout="constrained"
    )
    for column, workload in enumerate(workloads):
        for row, direction in enumerate(directions):
            top, bottom = axes[2 * row, column], axes[2 * row + 1, column]
            here = [r for r in results if (r["workload"], r["direction"]) == (workload, direction)]
            dense = {r["asked"]: r["seconds"]["median"] for r in here if r["implementation"] == "cudnn"}
            for who, colour in COLOURS.items():
                mine = sorted((r for r in here if r["implementation"] == who), key=lambda r: r["density"])
                x = [100 * r["density"] for r in mine]
                scale = [r["tflops"] * r["seconds"]["median"] for r in mine]
                low = [s / r["seconds"]["high"] for s, r in zip(scale, mine, strict=True)]
                high = [s / r["seconds"]["low"] for s, r in zip(scale, mine, strict=True)]
                top.plot(x, [r["tflops"] for r in mine], "o-", color=colour, label=kernel(who), markersize=4)
                top.fill_between(x, low, high, color=colour, alpha=0.2)
                if who != "cudnn":
                    bottom.plot(
                        x, [dense[r["asked"]] / r["seconds"]["median"] for r in mine], "o-", color=colour, markersize=4
                    )
            bottom.axhline(1, color=COLOURS["cudnn"], linewidth=1)
            bottom.set_yscale("log")
            low, high = bottom.get_ylim()
            bottom.set_yticks([y for y in (0.5, 1, 2, 5, 10, 20) if low < y < high])
            bottom.yaxis.set_major_formatter("{x:g}x")
            bottom.yaxis.set_minor_formatter("")
            top.set_ylim(bottom=0)
            top.set_title(f"{call(workload)}\n{direction}", fontsize=10)
            if column == 0:
                top.set_ylabel("TFLOP/s on active blocks")
                bottom.set_ylabel("speed-up over cuDNN dense")
    for axis in axes[-1]:
        axis.set_xlabel("active blocks, %")
        axis.set_xscale("log")
        axis.set_xticks([5, 10, 25, 50, 100], labels=["5", "10", "25", "50", "100"])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=12)
    device = run["environment"]["device"]
    figure.suptitle(f"{device}, bfloat16, mask blocks of 128, medians with quartiles", fontsize=12)
    figure.savefig(record.RESULTS / "gpu_attention.png", dpi=80)
