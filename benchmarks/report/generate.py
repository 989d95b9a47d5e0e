"""Writing after a long prompt: tokens per second, and the divergence from dense attention.

A part is empty as long as nothing was recorded, its heading included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.report.words import source, table

NAMES = {"qwen2.5-1.5b": "Qwen2.5-1.5B", "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B"}

Row = dict[str, Any]


def times() -> str:
    run = record.find("gpu_generate")
    if run is None:
        return ""
    rows, about = run["results"], run["environment"]["settings"]
    sparse = [way for way in rows[0]["seconds"] if way != "dense"]
    heads = ["batch", "dense", *(head for way in sparse for head in (way, f"{way} over dense"))]
    cells = [
        [
            f"{r['batch']}{' *' if 'commit' in r else ''}",
            _rate(r, "dense"),
            *(cell for way in sparse for cell in (_rate(r, way), f"{_gain(r, way):.2f}x")),
        ]
        for r in rows
    ]
    lines = [
        "### Writing after a long prompt",
        "",
        f"{_model(about)}, {about['dtype']}: new tokens per second, of all sequences together, into a cache of "
        f"{about['length']} tokens that the last {rows[0]['new_tokens']} fill; in brackets milliseconds per step and "
        "their quartiles. Each token is handed to the host. HADS chooses that share of the cache's blocks of "
        f"{about['block']} tokens for every token, in every layer; the time of choosing is included.",
        "",
        *table(heads, cells),
        "",
        *(_bytes(r) for r in rows),
    ]
    if slower := [f"{way} at batch {r['batch']}" for r in rows for way in sparse if _gain(r, way) < 1]:
        lines.append(f"- Slower than dense: {', '.join(slower)}.")
    if older := sorted({r["commit"][:7] for r in rows if "commit" in r}):
        lines.append(f"- Rows with a * are of an earlier run, commit {', '.join(older)}.")
    return "\n".join([*lines, "", source("gpu_generate.json", run, "jax")])


def quality() -> str:
    run = record.find("gpu_generate_quality")
    if run is None:
        return ""
    rows, about = run["results"], run["environment"]["settings"]
    budgets = list(dict.fromkeys(r["budget"] for r in rows))
    heads = ["texts", *(f"{what} at {budget:.0%}" for budget in budgets for what in ("KL", "same token"))]
    cells = [
        _cells(name, [r for r in rows if r["domain"] == name], budgets)
        for name in dict.fromkeys(r["domain"] for r in rows)
    ]
    cells.append(_cells("**all**", rows, budgets))
    lines = [
        "## Writing with some of the blocks",
        "",
        f"{_model(about)}, {about['dtype']}, blocks of {about['block']}: a text is read densely up to token "
        f"{rows[0]['prompt']}, and dense attention goes on greedily for {rows[0]['new_tokens']} tokens. HADS is fed "
        "the same tokens, and attends to the named share of the cache's blocks. KL(dense || HADS) in nats per token, "
        "and how often the likeliest next token is that of dense attention; means over texts.",
        "",
        *table(heads, cells),
        "",
        *(_spread([r for r in rows if r["budget"] == budget]) for budget in budgets),
    ]
    return "\n".join([*lines, "", source("gpu_generate_quality.json", run, "jax")])


def _model(about: Row) -> str:
    weights = ", random weights" if about["weights"] == "random" else ""
    return f"{NAMES.get(about['model'], about['model'])}{weights}"


def _rate(row: Row, way: str) -> str:
    time = row["seconds"][way]
    low, middle, high = (f"{time[name] * 1e3:.2f}" for name in ("low", "median", "high"))
    return f"{row['batch'] / time['median']:.0f} ({middle} ms, {low}-{high})"


def _gain(row: Row, way: str) -> float:
    return row["seconds"]["dense"]["median"] / row["seconds"][way]["median"]


def _bytes(row: Row) -> str:
    weights, cache = (row["bytes"][name] for name in ("weights", "cache"))
    return (
        f"- Batch {row['batch']}: a dense step reads {weights / 1e9:.2f} GB of weights and {cache / 1e9:.2f} GB of "
        f"cache. By bytes alone, a step that read no cache would be {(weights + cache) / weights:.1f}x as fast."
    )


def _cells(name: str, rows: list[Row], budgets: list[float]) -> list[str]:
    found = [f"{name}, {len({r['text'] for r in rows})}"]
    for budget in budgets:
        some = [r for r in rows if r["budget"] == budget]
        kl, same = (np.mean([r[what] for r in some]) for what in ("kl", "same_token"))
        found += [f"{kl:.4f}", f"{same:.1%}"]
    return found


def _spread(rows: list[Row]) -> str:
    least, most = (pick(rows, key=lambda r: r["kl"]) for pick in (min, max))
    low, median, high = (np.mean([r["kl_of_tokens"][name] for r in rows]) for name in ("low", "median", "high"))
    return (
        f"- At {rows[0]['budget']:.0%}, texts lie between {least['kl']:.4f} ({least['text']}) and {most['kl']:.4f} "
        f"({most['text']}). Within a text, the quartiles of the tokens' KL are {low:.5f}, {median:.5f} and {high:.5f} "
        f"on average; the largest of all is {max(r['largest_kl'] for r in rows):.2f}."
    )
