"""The picture of the recorded training runs: loss over tokens, and over time."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import record
from xsake._ground.words import in_words, model
from xsake.model.training.watch.run_file import read_events

COLOURS = {"dense": "grey", "sparse": "#0072b2", "hads": "#d55e00"}
SMOOTHED_STEPS = 15


def draw() -> None:
    run = record.load("train_gpu")
    results = [r for r in run["results"] if "held_out_loss" in r]
    presets = list(dict.fromkeys(r["preset"] for r in results))
    figure, axes = plt.subplots(2, len(presets), figsize=(5 * len(presets), 7), sharey=True, layout="constrained")
    for r in results:
        over_tokens, over_time = axes[:, presets.index(r["preset"])]
        events = read_events(record.RESULTS / "train_gpu" / f"{r['preset']}-{r['kind']}-{r['length']}.jsonl")
        steps = [event for event in events if event["event"] == "step"]
        held_out = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
        loss = np.convolve([s["loss"] for s in steps], np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, "valid")
        tokens = [s["step"] * r["tokens"] / len(steps) / 1e6 for s in steps]
        minutes = [t / 60 for t in itertools.accumulate(s["seconds"] for s in steps)]
        colour = COLOURS[r["kind"]]
        label = (
            "dense" if r["kind"] == "dense" else f"{in_words(r['config']['attention'])}, {r['density']:.0%} of blocks"
        )
        for axis, x in ((over_tokens, tokens), (over_time, minutes)):
            axis.plot(x[SMOOTHED_STEPS - 1 :], loss, color=colour, linewidth=1, label=label)
            axis.plot([x[step - 1] for step in held_out], list(held_out.values()), "o", color=colour, markersize=5)
        over_tokens.set_title(f"{model(r['preset'])}, {r['length']} tokens per sequence", fontsize=10)
        over_tokens.set_xlabel("million tokens")
        over_time.set_xlabel("minutes in training steps")
    axes[0, 0].set_ylim(3.5, 7)
    for axis in axes[:, 0]:
        axis.set_ylabel("loss (dots: held-out text)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{run['environment']['device']}, bfloat16 with float32 master weights", fontsize=10)
    figure.savefig(record.RESULTS / "train_gpu.png", dpi=80)
