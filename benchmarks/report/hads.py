"""The tables of HADS, made from the recorded study (`python -m benchmarks.hads`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.hads.methods import RIVALS, STRENGTHENED
from benchmarks.report.shared_texts import Shared, shared
from benchmarks.report.words import source, table, went_on

FOLDER = record.RESULTS / "hads"
ALWAYS = ("sink_window", "oracle_top_k", "oracle_gain")
KIN = ("hads_group", "hads_shares_top_k+forced")  # HADS with something taken away
NAMES = {
    "ada_kv": "our block-level AdaKV",
    "big_bird": "BigBird's pattern",
    "blasst": "our block-level BLASST",
    "cobs": "our block-level COBS",
    "duo": "our block-level DuoAttention",
    "entropy_infer": "our block-level EntropyInfer",
    "flex_prefill": "our block-level FlexPrefill",
    "flash_prefill": "our block-level FlashPrefill",
    "hads_group": "HADS, one mask per K/V head",
    "hads_shares_top_k": "ablation of HADS: its head shares, mean-pooled top-k",
    "hads_v1": "HADS, first idea",
    "hads_v1_random": "HADS, first idea, random blocks",
    "kascade": "our block-level Kascade",
    "longformer": "Longformer's pattern",
    "mean_top_k": "mean-pooled top-k",
    "minference": "our token-level MInference",
    "oracle_gain": "oracle: true masses, HADS's rule",
    "oracle_top_k": "oracle: true masses, equal numbers for all rows and heads",
    "power": "our block-level PowerAttention",
    "prism": "our block-level Prism",
    "quest": "our block-level Quest",
    "sink_window": "sink + window",
    "sliding_window": "window",
    "sparge": "our block-level SpargeAttention",
    "vertical_slash": "our block-level vertical-slash of MInference",
    "x_attention_16": "our block-level XAttention, stride 16",
    "x_attention_8_heads": "our block-level XAttention, stride 8, a threshold per head",
    "x_attention_8": "our block-level XAttention, stride 8",
}

MANY = 20  # a study of more methods has a table of all of them, each on its own texts
MODELS = {"qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B, "}  # others than SmolLM2
AIMS = {"qwen2.5-coder-1.5b": {0.2: 0.005, 0.1: 0.02}}  # of HADS's perplexity over dense, by budget

Row = dict[str, Any]


def every_study() -> str:
    """A section for each model, length and block that was studied, the longest first."""
    return "\n\n".join(f"### {shape(run)}\n\n{study(run)}" for run in studies())


def studies() -> list[dict[str, Any]]:
    """The recorded summaries; `name` is that of the study in the names of its files."""
    paths = sorted(FOLDER.glob("summary-*.json"), key=_longest_first)
    return [json.loads(path.read_text()) | {"name": path.stem.removeprefix("summary-")} for path in paths]


def short() -> str:
    """SmolLM2's study of the longest texts at three budgets, for the README."""
    run = next(run for run in studies() if run["about"]["model"] == "smollm2")
    rows, by = compared(run)
    budgets = [b for b in budgets_of(run) if b in (0.1, 0.2, 0.43)]
    rivals, forced = ranked(rows, RIVALS), ranked(rows, STRENGTHENED)
    shown = ("hads", *KIN, forced[0], *rivals[:2], "sink_window", "oracle_gain")
    cells = [
        [title(name), *(cell(by[name, b]) for b in budgets), str(by[name, budgets[0]]["sequences"])] for name in shown
    ]
    lines = table(["method", *(f"{b:.0%} of blocks" for b in budgets), "texts"], cells)
    return "\n".join([*lines, "", f"{shape(run)}. {origin(run)}"])


def study(run: dict[str, Any]) -> str:
    rows, by = compared(run)
    budgets = budgets_of(run)
    plain_rivals, forced = ranked(rows, RIVALS), ranked(rows, STRENGTHENED)
    most = by["hads", budgets[0]]
    sequences = most["sequences"]
    on_shared = same_texts(run)
    best = [plain_rivals, forced]
    if on_shared:  # that table has what has read fewer texts than HADS
        best = [[name for name in names if by[name, budgets[0]]["sequences"] == sequences] for names in best]
    shown = ["hads", *KIN, *best[1][:3], *best[0][:3], *(() if on_shared else ALWAYS)]
    shown = [name for name in shown if (name, budgets[0]) in by]
    cells = []
    for name in dict.fromkeys(shown):
        own = by[name, budgets[0]]["sequences"]
        texts = "" if own == sequences else f" ({own} texts)"
        cells.append([f"{title(name)}{texts}", *(cell(by.get((name, b)), own) for b in budgets)])
    rivals = [r for r in rows if r["method"] in RIVALS or r["method"] in STRENGTHENED]
    return "\n".join(
        [
            f"KL divergence from dense attention on {sequences} texts of {most['documents']} documents, nats per "
            "token, and in brackets perplexity over dense, by share of active blocks:",
            "",
            *table(["method", *(f"{b:.0%}" for b in budgets)], cells),
            "",
            *facts(by, budgets, plain_rivals, forced, rivals),
            *aims(run, by),
            *lent(run, budgets),
            " ".join([f"- {origin(run)}", *went_on(run, bare)]),
            *on_shared,
            *answers(run["tasks"]),
            *last_rows(run),
        ]
    )


def same_texts(run: dict[str, Any]) -> list[str]:
    """Every method of a small study on the texts that all have read, best first; nothing if they read the same."""
    found = of_small_study(run)
    if found is None:
        return []
    by = {(r["method"], r["budget"]): r for r in found.rows}
    heads = ["method"]
    for b in found.budgets:
        heads += [f"KL at {b:.0%}", "HADS's KL minus it"]
    cells = []
    for name in ranked(found.rows, {name for name, _ in by}):
        row = [title(name)]
        for b in found.budgets:
            row += [cell(by[name, b], found.texts), interval(by[name, b]["against"])]
        cells.append(row)
    return [
        "",
        f"All methods on the {found.texts} texts that every one of them has read: KL, in brackets perplexity over "
        "dense, and the paired difference with its 95% interval:",
        "",
        *table(heads, cells),
        "",
        f"- HADS's KL is below the rival's in {found.lower.count} of {found.lower.of} comparisons of one text at one "
        f"budget. With {found.texts} texts an interval says little more than that. Of all texts and budgets that were "
        f"run, it is below in {found.lower_everywhere.count} of {found.lower_everywhere.of}.",
    ]


def of_small_study(run: dict[str, Any]) -> Shared | None:
    return shared(run["name"]) if len({r["method"] for r in run["methods"]}) <= MANY else None


def interval(difference: Row | None) -> str:
    return "" if difference is None else "{mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**difference)


def compared(run: dict[str, Any]) -> tuple[list[Row], dict[tuple[str, float], Row]]:
    """The results at the budgets that were compared, and the same by (method, budget)."""
    rows = [r for r in run["methods"] if r["layers"] == "profile" and r["budget"] in budgets_of(run)]
    return rows, {(r["method"], r["budget"]): r for r in rows}


def origin(run: dict[str, Any]) -> str:
    return source("hads/", run, "jax")


def shape(run: dict[str, Any]) -> str:
    about = run["about"]
    return f"{MODELS.get(about['model'], '')}{about['length']} tokens, blocks of {about['block']}"


def cell(row: Row | None, sequences: int | None = None) -> str:
    """KL and perplexity over dense, and the number of texts if it differs from `sequences`, that of the table's row."""
    if row is None:
        return ""
    texts = "" if sequences in (None, row["sequences"]) else f", {row['sequences']} texts"
    return f"{row['kl']:.4f} ({row['perplexity_gap']:+.2%}{texts})"


def facts(
    by: dict[tuple[str, float], Row],
    budgets: Sequence[float],
    plain_rivals: Sequence[str],
    forced: Sequence[str],
    rivals: Sequence[Row],
) -> list[str]:
    below = [r for r in rivals if is_below(r["against"])]
    others = [r for r in rivals if r not in below]
    exceptions = f" Not below 0: {listed(others)}." if others else ""
    surer = [r for r in rivals if is_below(r["loss_against"])]
    worse = [r for r in rivals if r["loss_against"]["low"] is not None and r["loss_against"]["low"] > 0]
    mended = sorted({plain(name) for name, _ in by if "_older" in name})
    left_out = f" Not counted, since mended after the run: {'; '.join(mended)}." if mended else ""
    likelier = [r for r in rivals if r["loss_against"]["mean"] > 0]
    kin = [by[name, b] for name in KIN for b in budgets if (name, b) in by and not is_below(by[name, b]["against"])]
    kin_lost = [by[n, b] for n in KIN for b in budgets if (n, b) in by and by[n, b]["loss_against"]["mean"] > 0]
    names = {r["method"] for r in rivals}

    def over(best: Sequence[str]) -> str:
        """HADS's KL over the KL of the best of these methods, by budget, on the texts that both have read."""
        shares = (
            [1 + by[name, b]["against"]["mean"] / by[name, b]["kl"] for name in best if (name, b) in by]
            for b in budgets
        )
        return " / ".join(f"{max(share):.2f}" if share else "not run" for share in shares)

    off = max(r["off_budget"] for r in by.values())
    kinds = "with and without HADS's forced blocks" if plain_rivals else "all with HADS's forced blocks"
    bare_rivals = f" without forced blocks, by budget: {over(plain_rivals)};" if plain_rivals else ", by budget,"
    texts = sorted({r["sequences"] for r in rivals})
    few = f", on {texts[0]} to {texts[-1]} texts" if len(texts) > 1 else ""
    up_to = "up to " if len(rivals) < len(names) * len(budgets) else ""
    return [
        f"- {len(names)} rivals ({kinds}) at {up_to}{len(budgets)} budgets{few}: the 95% interval of "
        f"HADS's KL minus the rival's KL, paired by text, documents resampled whole, lies below 0 in {len(below)} of "
        f"{len(rivals)} comparisons.{exceptions}{left_out}",
        f"- The same for the logarithm of perplexity: below 0 in {len(surer)}, above 0 in {len(worse)}"
        + (f" ({listed(worse)})." if worse else "."),
        *([f"- Of the rivals, mean perplexity below HADS's: {listed(likelier)}."] if likelier else []),
        *([f"- Of HADS's own kin, KL not surely above HADS's: {listed(kin)}."] if kin else []),
        *([f"- Of HADS's own kin, mean perplexity below HADS's: {listed(kin_lost)}."] if kin_lost else []),
        f"- HADS's KL over the KL of the best rival{bare_rivals} with HADS's forced blocks: {over(forced)}.",
        f"- The active blocks of every method differ from the budget by at most {off:.2%}, on every text.",
    ]


def aims(run: dict[str, Any], by: dict[tuple[str, float], Row]) -> list[str]:
    """HADS's perplexity beside what was aimed at for this model."""
    said = []
    for budget, most in AIMS.get(run["about"]["model"], {}).items():
        gap = by["hads", budget]["perplexity_gap"]
        said.append(f"{most:+.1%} at {budget:.0%} ({'met' if gap <= most else 'missed'}: {gap:+.2%})")
    if not said:
        return []
    return [f"- Aims for HADS's perplexity over dense: at most {', '.join(said)}.", *beside_oracle(run, by)]


def beside_oracle(run: dict[str, Any], by: dict[tuple[str, float], Row]) -> list[str]:
    """HADS's perplexity beside the oracle's on the texts that the oracle has read."""
    said = []
    for budget in AIMS[run["about"]["model"]]:
        if (oracle := by.get(("oracle_gain", budget))) is not None:
            own = np.expm1(np.log1p(oracle["perplexity_gap"]) + oracle["loss_against"]["mean"])
            theirs = f"the oracle {oracle['perplexity_gap']:+.2%} ({oracle['sequences']} texts)"
            said.append(f"at {budget:.0%} HADS {own:+.2%}, {theirs}")
    return [f"- The same on the texts that the oracle has read: {'; '.join(said)}."] if said else []


def is_below(difference: Row | None) -> bool:
    return difference is not None and difference["high"] is not None and difference["high"] < 0


def listed(rows: Sequence[Row]) -> str:
    """Methods, each with its budgets."""
    budgets: dict[str, list[str]] = {}
    for r in sorted(rows, key=lambda r: r["budget"]):
        budgets.setdefault(plain(r["method"]), []).append(f"{r['budget']:.0%}")
    return "; ".join(f"{name} at {', '.join(of)}" for name, of in budgets.items())


def lent(run: dict[str, Any], budgets: Sequence[float]) -> list[str]:
    """What the profile's division of blocks among layers, which every method gets, is worth to each."""
    at = 0.2
    shown = [r for r in run.get("layer_division", ()) if r["budget"] == at and at in budgets]
    if not shown:
        return []
    said = "; ".join(f"{bare(r['method'])} {r['uniform']:.4f} without it, {r['profile']:.4f} with it" for r in shown)
    return [
        f"- The division of blocks among layers is HADS's, and lent to every method. KL at {at:.0%} on "
        f"{shown[0]['sequences']} texts: {said}."
    ]


def every_method() -> str:
    """All methods of the studies in which every method was tried, best first: KL and perplexity."""
    parts = []
    for run in studies():
        rows, by = compared(run)
        names = {r["method"] for r in rows}
        if len(names) <= MANY:
            continue
        budgets = [b for b in budgets_of(run) if b in (0.1, 0.2, 0.43)]
        cells = [
            [title(name), *(cell(by.get((name, b))) for b in budgets), str(by[name, budgets[0]]["sequences"])]
            for name in ranked(rows, names)
        ]
        heads = ["method", *(f"{b:.0%}" for b in budgets), "texts"]
        parts.append("\n".join([f"### All methods, {shape(run)}", "", *table(heads, cells)]))
    return "\n\n".join(parts)


def answers(tasks: Sequence[Row]) -> list[str]:
    """The share that each method keeps of the answers that the dense model gets right."""
    if not tasks:
        return []
    middle = [t for t in tasks if "_middle" in t["domain"]]
    if middle and len(middle) < len(tasks):
        return [*answers([t for t in tasks if t not in middle]), *answers(middle)]
    budgets = sorted({t["budget"] for t in tasks})
    names = list(dict.fromkeys(t["domain"] for t in tasks))
    where = "in the middle of the text" if middle else "at the end of the text"
    by = {(t["method"], t["domain"], t["budget"]): t["retention"] for t in tasks}
    asked = {t["domain"]: t["asked"] for t in tasks}
    words = {name: name.split("-")[0].removesuffix("_middle") for name in names}
    heads = [f"{words[name]} at {b:.0%}" for name in names for b in budgets]
    counts = ", ".join(f"{words[name]}: {asked[name]}" for name in names)
    cells = [
        [title(method), *(f"{by[method, name, b]:.0%}" for name in names for b in budgets)]
        for method in dict.fromkeys(t["method"] for t in tasks)
    ]
    return [
        "",
        f"Share kept of the answers that the dense model gets right, asked {where} ({counts}):",
        "",
        *table(["method", *heads], cells),
    ]


def last_rows(run: dict[str, Any]) -> list[str]:
    """KL and answers with the weight of the last rows given to every method, and to none, where this was run."""
    settings = {"every": "every method (a rival's last rows keep as many blocks as HADS's)", "none": "no method"}
    lines = []
    for setting, found in run.get("last_rows", {}).items():
        by = {(r["method"], r["budget"]): r for r in found["methods"] if r["layers"] == "profile"}
        budgets = sorted({budget for _, budget in by})
        names = ranked(list(by.values()), {name for name, _ in by})
        cells = [[title(name), *(cell(by.get((name, b))) for b in budgets)] for name in names]
        lines += [
            "",
            f"With the weight of the last rows given to {settings[setting]}, KL and perplexity over dense:",
            "",
        ]
        lines += [*table(["method", *(f"{b:.0%}" for b in budgets)], cells), *answers(found["tasks"])]
    return lines


def first_table() -> str:
    """Patterns at the unequal shares of blocks that the project's first table gave them, and all at HADS's share."""
    (path,) = FOLDER.glob("seed-*.json")
    run = json.loads(path.read_text())
    heads = ["method", "active blocks", "choosing blocks, ms", "attention, ms", "KL", "perplexity"]
    cells = [
        [
            r["method"],
            f"{r['active_blocks']:.0%}",
            f"{r['mask_ms']:.2f}",
            f"{r['attention_ms']:.2f}",
            f"{r['kl']:.4f}",
            f"{r['perplexity_gap']:+.2%}",
        ]
        for r in run["results"]
    ]
    return "\n".join([*table(heads, cells), "", f"Times are for one sequence in all layers. {origin(run)}"])


def mask_cost() -> str:
    """Choosing blocks and attention, beside dense attention, by length and budget."""
    run = record.load("hads_mask_cost")
    by = {(r["length"], r["what"]): r["seconds"]["median"] for r in run["results"]}
    heads = [
        "tokens",
        "budget",
        "dense (cuDNN)",
        "mask alone",
        "mask over dense",
        "mask over sparse attention",
        "mask and attention",
        "speed-up",
        "added by the mask",
    ]
    cells = []
    for length, what in sorted(by, key=lambda at: -at[0]):
        if not what.startswith("mask: hads at "):
            continue
        budget = what.removeprefix("mask: hads at ")
        dense, mask = by[length, "dense"], by[length, what]
        sparse, both = by[length, f"attention: hads at {budget}"], by[length, f"mask and attention: hads at {budget}"]
        row = [str(length), budget, f"{1e3 * dense:.2f} ms", f"{1e3 * mask:.2f} ms", f"{mask / dense:.1%}"]
        row += [
            f"{mask / sparse:.0%}",
            f"{1e3 * both:.2f} ms",
            f"{dense / both:.2f}x",
            f"{1e3 * (both - sparse):.2f} ms",
        ]
        cells.append(row)
    return "\n".join([*table(heads, cells), "", source("hads_mask_cost.json", run, "jax")])


def ranked(rows: Sequence[Row], among: Any) -> list[str]:
    """Best first, by the mean of the logarithm of KL over the budgets that all of these methods have."""
    logs: dict[str, dict[float, float]] = {}
    for r in rows:
        if r["method"] in among:
            logs.setdefault(r["method"], {})[r["budget"]] = float(np.log(r["kl"]))
    common = sorted(set.intersection(*map(set, logs.values()))) if logs else []
    return sorted(logs, key=lambda name: float(np.mean([logs[name][b] for b in common])))


def budgets_of(run: dict[str, Any]) -> list[float]:
    """The budgets at which methods were compared, without budgets that only patterns of the first table have."""
    return sorted({r["budget"] for r in run["methods"] if r["method"] == "hads"})


def title(name: str) -> str:
    return "**HADS**" if name == "hads" else plain(name)


def bare(name: str) -> str:
    return "HADS" if name == "hads" else plain(name)


def plain(name: str) -> str:
    """A method's name in words."""
    method = name.removesuffix("+forced").removesuffix("_older")
    version = ", older version" if "_older" in name else ""
    return NAMES.get(method, method) + version + (" + forced blocks" if name.endswith("+forced") else "")


def _longest_first(path: Any) -> tuple[int, int]:
    *_, length, block = path.stem.split("-")
    return -int(length), int(block)
