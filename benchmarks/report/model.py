"""Training runs, and the perplexity of a pretrained model."""

from __future__ import annotations

from benchmarks import record
from benchmarks.report.words import milliseconds, source, table


def train_gpu() -> str:
    """Whole runs, and the time of a step at the longer length, beside dense attention."""
    run = record.load("train_gpu")
    heads = [
        "model",
        "tokens per sequence",
        "attention",
        "active blocks",
        "time per step",
        "over dense",
        "tokens/s",
        "MFU",
        "held-out loss",
    ]
    dense = {(r["preset"], r["length"]): r for r in run["results"] if r["kind"] == "dense"}
    rows = []
    for r in sorted(run["results"], key=lambda r: (r["length"], r["preset"] != "small", r["kind"])):
        ratio = dense[r["preset"], r["length"]]["seconds"]["median"] / r["seconds"]["median"]
        alone = "beside" not in r
        loss = f"{r['held_out_loss']:.3f} after {r['tokens'] / 1e6:.0f}M tokens" if "held_out_loss" in r else ""
        rows.append(
            [
                r["preset"],
                str(r["length"]),
                "dense (cuDNN)" if r["kind"] == "dense" else r["config"]["attention"],
                f"{r['density']:.0%}",
                milliseconds(r["seconds"]) if alone else "not timed alone",
                f"{ratio:.2f}x as fast" if alone and r["kind"] != "dense" else "",
                f"{r['tokens_per_second']:,.0f}" if alone else "",
                f"{r['mfu']:.0%}" if alone else "",
                loss,
            ]
        )
    notes = [
        f"The {r['config']['attention']} run (commit {r['environment']['commit'][:7]}) ran beside {r['beside']}."
        for r in run["results"]
        if "beside" in r
    ]
    origin = source("train_gpu.json", run, "jax")
    return "\n".join([*table(heads, rows), "", *notes, f"Times are medians with quartiles. {origin}"])


def smollm2() -> str:
    run = record.load("smollm2")
    r = run["results"]
    worst = max(window["sparse_difference"] for window in r["windows"])
    return (
        f"SmolLM2-135M, loaded this way, reads Python's own documentation with a perplexity of {r['perplexity']:.1f} "
        f"({len(r['windows'])} windows of {r['length']} tokens, {r['dtype']}). With a mask that lists every block, no "
        f"logit differs from dense attention's by more than {worst:.0e}. {source('smollm2.json', run, 'jax')}"
    )
