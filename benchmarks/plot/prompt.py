"""The picture of the time to the first token over the prompt's length, dense beside HADS."""

from __future__ import annotations

import matplotlib.pyplot as plt

from benchmarks import record
from benchmarks.report.generation import DENSE, whole_seconds
from xsake._ground.words import model

MODEL = "qwen2.5-1.5b"
COLOURS = {DENSE: "grey", "HADS 20%": "#56b4e9", "HADS 10%": "#0072b2", "HADS 5%": "#009e73"}


def draw() -> None:
    long = record.load("gpu_prompt_long")
    rows = [r | {"layers": 1, "of": 1} for r in record.load("gpu_prompt")["results"]] + long["results"]
    rows = sorted((r for r in rows if r["model"] == MODEL), key=lambda r: r["length"])
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for way, colour in COLOURS.items():
        here = [r for r in rows if way in r["seconds"]]
        seconds = [whole_seconds(r, way) for r in here]
        label = way.replace(DENSE, "dense, cuDNN")
        axis.plot([r["length"] for r in here], seconds, "o-", color=colour, label=label, markersize=5)
        last = here[-1]["seconds"]
        if way != DENSE:
            gain = last[DENSE]["median"] / last[way]["median"]
            axis.annotate(f"{gain:.1f}x", (here[-1]["length"], seconds[-1]), (6, -3), textcoords="offset points")
    lengths = [r["length"] for r in rows]
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, labels=[f"{n:,}" for n in lengths])
    axis.set_xlim(0.9 * lengths[0], 1.25 * lengths[-1])
    axis.set_yscale("log")
    axis.set_yticks([0.2, 0.5, 1, 2, 5])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("tokens of the prompt")
    axis.set_ylabel("seconds to the first token")
    axis.set_title(f"{model(MODEL)}, random weights, one {long['environment']['device']}", fontsize=10)
    axis.legend()
    figure.savefig(record.RESULTS / "gpu_prompt_long.png", dpi=100)
