"""The tables of HADS: what it costs in quality, beside other methods, without its parts, and where it pays."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence

from benchmarks import record
from benchmarks.report import generation
from benchmarks.report.study import MANY, SHOWN, Study, is_below, over_best, ranked, studies, study
from benchmarks.report.words import Row, Run, facts, grid, listing, median, ms, section, span, times, unique
from xsake._ground.words import in_words, model

PATTERNS_AND_ORACLES = ("sink_window", "oracle_top_k", "oracle_gain")
QWEN, SMOLLM2 = ("qwen2.5-coder-1.5b", 32768), ("smollm2", 8192)
ABLATIONS = (
    "hads_no_burstiness",
    "hads_equal_heads",
    "hads_group",
    "hads_estimate_top_p",
    "hads_estimate_top_k",
    "hads_rule_antidiagonal",
    "hads_rule_mean_pool",
    "hads_shares_top_k+forced",
)


def title(name: str) -> str:
    return "**HADS**" if name == "hads" else in_words(name)


def percents(budgets: Sequence[float]) -> dict[float, str]:
    return {b: f"{b:.0%}" for b in budgets}


def quality(row: Row | None, texts: int | None = None) -> str:
    """KL, perplexity over dense, and the number of texts if it is not `texts`."""
    if row is None:
        return ""
    other = "" if texts in (None, row["sequences"]) else f", {row['sequences']} texts"
    return f"{row['kl']:.4f} ({row['perplexity_gap']:+.2%}{other})"


def short() -> str:
    """SmolLM2's study of the longest texts at three budgets, for the README."""
    of = study(*SMOLLM2)
    plain, forced = of.rivals(forced=False), of.rivals(forced=True)
    shown = ("hads", "hads_group", forced[0], *plain[:2], "sink_window", "oracle_gain")
    return section(by_method(of, shown, SHOWN), f"{of.title()}. {_source(of)}")


def by_method(of: Study, methods: Sequence[str], budgets: Sequence[float]) -> str:
    """KL and perplexity of some methods, with the number of texts of each."""
    texts = {name: of.by[name, budgets[0]]["sequences"] for name in dict.fromkeys(methods)}
    rows = {name: (title(name), str(number)) for name, number in texts.items()}
    return grid(
        ("method", "texts"), rows, percents(budgets), lambda name, b: quality(of.by.get((name, b)), texts[name])
    )


def _source(of: Study) -> str:
    return of.run.source("jax")


def qwen() -> str:
    """All methods on the texts that every one of them has read."""
    of = study(*QWEN)
    found = of.shared()
    assert found is not None
    by = {(r["method"], r["budget"]): r for r in found.rows}
    columns = {
        (what, b): words.format(b)
        for b in found.budgets
        for what, words in (("kl", "{:.0%}"), ("", "HADS's KL minus this method's, {:.0%}"))
    }

    def cell(name: str, column: tuple[str, float]) -> str:
        what, budget = column
        row = by[name, budget]
        return quality(row, found.texts) if what else interval(row["against"])

    own = [of.by["hads", b] for b in of.budgets]
    longer = ", ".join(f"{r['kl']:.4f} at {r['budget']:.0%} ({r['sequences']} texts)" for r in own)
    return section(
        grid("method", {n: title(n) for n in ranked(found.rows, of.methods)}, columns, cell),
        facts(
            f"The table is of the {found.texts} texts that every method has read.",
            f"HADS's KL on all texts that HADS has read: {longer}.",
            f"HADS's KL is below the rival's in {found.lower_everywhere.count} of {found.lower_everywhere.of} "
            "comparisons of one text at one budget.",
        ),
        _source(of),
    )


def interval(difference: Row | None) -> str:
    return "" if difference is None else "{mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**difference)


def smollm2() -> str:
    of = study(*SMOLLM2)
    plain, forced = of.rivals(forced=False), of.rivals(forced=True)
    return section(
        by_method(of, ("hads", *forced[:3], *plain[:3], *PATTERNS_AND_ORACLES), of.budgets),
        facts(_layers_lent(of)),
        last_rows(of.run.content, str(of.about["length"])),
        _source(of),
    )


def _listed(rows: Sequence[Row]) -> str:
    """Methods, each with its budgets."""
    found: dict[str, list[str]] = {}
    for r in sorted(rows, key=lambda r: r["budget"]):
        found.setdefault(in_words(r["method"]), []).append(f"{r['budget']:.0%}")
    return "; ".join(f"{name} at {', '.join(at)}" for name, at in found.items())


def _layers_lent(of: Study, at: float = 0.2) -> str | None:
    """What the profile's division of blocks among layers, which every method gets, is worth to each."""
    found = [r for r in of.run.content.get("layer_division", ()) if r["budget"] == at]
    said = ", ".join(f"{in_words(r['method'])} {r['uniform']:.4f} / {r['profile']:.4f}" for r in found)
    return f"KL at {at:.0%} without HADS's division of blocks among layers, and with it: {said}." if found else None


def lengths() -> str:
    """HADS beside the best rival, and how many comparisons are sure, at every length and block size."""
    found = {of.name: of for of in studies()}
    open_ = {name: [r for r in of.compared() if not is_below(r["against"])] for name, of in found.items()}
    columns: dict[float | str, str] = {
        **percents(SHOWN),
        "kl": "KL surely lower",
        "perplexity": "perplexity surely lower",
    }

    def cell(name: str, column: float | str) -> str:
        of, rows = found[name], found[name].compared()
        if column == "kl":
            return f"{len(rows) - len(open_[name])} of {len(rows)}"
        if column == "perplexity":
            return f"{sum(is_below(r['loss_against']) for r in rows)} of {len(rows)}"
        return f"{of.by['hads', column]['kl']:.4f} ({times(over_best(of, column))})"

    older = sorted({in_words(name) for of in found.values() for name in of.methods if "_older" in name})
    return section(
        grid("model and texts", {name: of.title() for name, of in found.items()}, columns, cell),
        facts(
            *(
                f"{found[name].title()}: KL is not surely lower than that of {_listed(rows)}."
                for name, rows in open_.items()
                if rows
            ),
            *(
                f"{of.title()}: perplexity is surely higher than that of {_listed(worse)}."
                for of in found.values()
                if (worse := [r for r in of.compared() if (r["loss_against"]["low"] or 0) > 0])
            ),
            f"Left out, since mended after the run: {'; '.join(older)}." if older else None,
        ),
        "Recorded in `benchmarks/results/hads/summary-*.json`.",
    )


def answers() -> str:
    """The share that each method keeps of the answers that the dense model gets right."""
    return kept({f"{of.about['length']}": of.tasks for of in studies() if of.tasks})


def kept(tasks: dict[str, list[Row]]) -> str:
    """By the words for some texts: a column per kind of task, with the shares at every budget."""
    every = [(texts, _kind(t), t) for texts, found in tasks.items() for t in found]
    budgets = sorted({t["budget"] for *_, t in every})
    by = {(texts, t["method"], kind, t["budget"]): f"{t['retention']:.0%}" for texts, kind, t in every}
    rows = {(texts, t["method"]): (texts, title(t["method"])) for texts, _, t in every}
    shares = " / ".join(f"{b:.0%}" for b in budgets)
    asked = {(texts, kind): f"{t['asked']} of {kind}" for texts, kind, t in every}
    said = (f"{texts} tokens: {', '.join(words for (of, _), words in asked.items() if of == texts)}" for texts in tasks)
    return section(
        grid(
            ("tokens", "method"),
            rows,
            {kind: f"{kind}, {shares}" for kind in unique(kind for _, kind, _ in every)},
            lambda at, kind: " / ".join(by[*at, kind, b] for b in budgets),
        ),
        facts(f"Answers that the dense model gives: {'; '.join(said)}."),
    )


def _kind(task: Row) -> str:
    return task["domain"].split("-")[0].replace("_middle", " in the middle")


def last_rows(of: Row, texts: str) -> str:
    """KL and answers with the weight of the last rows given to every method, and to none, where this was run."""
    settings = {"every": "every method", "none": "no method"}
    parts = []
    for setting, found in of.get("last_rows", {}).items():
        by = {(r["method"], r["budget"]): r for r in found["methods"] if r["layers"] == "profile"}
        budgets, names = sorted({b for _, b in by}), unique(name for name, _ in by)
        parts += [
            f"With the weight of the last rows given to {settings[setting]}:",
            grid(
                "method", {n: title(n) for n in names}, percents(budgets), lambda n, b, by=by: quality(by.get((n, b)))
            ),
            kept({texts: found["tasks"]}) if found["tasks"] else None,
        ]
    return section(*parts)


def ablations() -> str:
    """HADS with a part replaced or left out, and its KL over HADS's on the same texts."""
    of = study(*SMOLLM2)

    def cell(name: str, budget: float) -> str:
        row = of.by[name, budget]
        against = row["against"]
        own = "" if against is None else f", {times(row['kl'] / (row['kl'] + against['mean']))}"
        return f"{row['kl']:.4f}{own}"

    rows = {name: title(name) for name in ("hads", *ABLATIONS)}
    return section(grid("method", rows, percents(SHOWN), cell), f"{of.title()}. {_source(of)}")


def probes() -> str:
    """HADS with probes, beside HADS with as many blocks more as the probes' products would pay for."""
    run = Run.load("hads/probes-smollm2-4096")
    by = run.by("method", "budget")
    budgets = {b: f"{b:.0%}" if round(100 * b) == 100 * b else f"{b:.1%}" for b in sorted({b for _, b in by})}

    def cell(name: str, budget: float) -> str:
        row = by.get((name, budget))
        return "" if row is None else f"{sum(row['kl_by_text']) / len(row['kl_by_text']):.4f}"

    texts = len(run.results[0]["kl_by_text"])
    return section(
        grid("method", {name: _PROBED[name] for name, _ in by}, budgets, cell),
        facts(f"KL of SmolLM2-135M, {texts} texts of 4096 tokens, blocks of 64 x 16."),
        run.source("jax"),
    )


_PROBED = {
    "hads": "HADS",
    "hads_probes_16": "HADS, every 16th query a probe",
    "hads_probes_8": "HADS, every 8th query a probe",
    "oracle_gain": "oracle",
}


def every_method() -> str:
    """All methods of the studies in which every method was tried, best first."""
    wanted = [of for of in studies() if len(of.methods) > MANY]
    return section(
        *(
            section(
                f"### {of.title()}", by_method(of, ranked(of.rows, of.methods), [b for b in SHOWN if b in of.budgets])
            )
            for of in wanted
        )
    )


def first_table() -> str:
    """Patterns at the unequal shares of blocks that the project's first table gave them, and all at HADS's share."""
    (run,) = Run.load_all("hads/seed-")
    columns = {
        "method": lambda r: in_words(r["method"]),
        "active blocks": "{active_blocks:.0%}",
        "choosing blocks": "{mask_ms:.2f} ms",
        "attention": "{attention_ms:.2f} ms",
        "KL": "{kl:.4f}",
        "perplexity": "{perplexity_gap:+.2%}",
    }
    return section(listing(run.results, columns), f"Times are for one sequence in all layers. {run.source('jax')}")


def _costs() -> tuple[Run, dict[int, Row]]:
    """Seconds by length and by what was timed."""
    run = Run.load("hads_mask_cost")
    by: dict[int, Row] = {}
    for r in sorted(run.results, key=lambda r: r["length"]):
        by.setdefault(r["length"], {})[r["what"]] = r["seconds"]["median"]
    return run, by


def mask_cost() -> str:
    """Choosing blocks and attending to them, beside dense attention."""
    run, by = _costs()
    columns = {
        (what, b): words.format(b)
        for b in ("10%", "20%", "43%")
        for what, words in (("mask", "choosing, {}"), ("both", "both, {}"))
    }

    def cell(length: int, column: tuple[str, str]) -> str:
        what, budget = column
        if what == "mask":
            return ms(by[length][f"mask: hads at {budget}"])
        both = by[length][f"mask and attention: hads at {budget}"]
        return f"{ms(both)} ({times(by[length]['dense'] / both, 1)})"

    rows = {length: (str(length), ms(seconds["dense"])) for length, seconds in by.items()}
    return section(grid(("tokens", "cuDNN, dense"), rows, columns, cell), run.source("jax"))


def pays() -> str:
    """From which length HADS pays: its speed over dense attention by cuDNN, and its KL over that of other methods."""
    _, by = _costs()
    budgets = ("43%", "20%", "10%")
    gains = {n: [s["dense"] / s[f"mask and attention: hads at {b}"] for b in budgets] for n, s in by.items()}
    first, last = min(n for n, found in gains.items() if min(found) > 1), max(gains)
    shortest = ", the shortest that was measured" if first == min(by) else ""
    prompts = {
        f"at {r['length']} tokens with {generation.named(r)}": [
            generation.over_dense(r, way) for way in r["seconds"] if re.fullmatch(r"HADS \d+%", way)
        ]
        for r in Run.load("gpu_prompt").results
    }
    written = Run.load("gpu_generate").results
    return facts(
        f"Attention alone, the choice of blocks included, is faster than cuDNN's dense attention from {first} tokens "
        f"on{shortest}: {span(gains[first], '{:.1f}x')} with 43% to 10% of the blocks, and "
        f"{span(gains[last], '{:.1f}x')} at {last} tokens.",
        "The first token of a whole model, with 20% and 10% of the blocks: "
        f"{'; '.join(f'{span(found, "{:.1f}x")} {words}' for words, found in prompts.items())}.",
        f"New tokens after {written[0]['length']}, with 10% of the blocks: "
        f"{', '.join(f'{times(median(r, "dense") / median(r, "HADS 10%"))} at batch {r["batch"]}' for r in written)}.",
        "HADS's KL over that of the best other method, with 10%, 20% and 43% of the blocks: "
        f"{'; '.join(f'{", ".join(times(over_best(of, b)) for b in SHOWN)} with {of.title()}' for of in studies())}.",
        f"On the one text that the dashboard's explorer shows: {explored()}.",
    )


def explored() -> str:
    """HADS's KL over that of the best other method on the explorer's text, a shorter one than any of the studies."""
    path = record.RESULTS / "explorer" / "smollm2-2048-64.json.xz"
    about = json.loads(lzma.decompress(path.read_bytes()))["about"]
    kl = {(r["method"], r["budget"]): r["kl"] for r in about["results"]}
    others = [name for name in about["methods"] if name != "hads" and name not in about["oracles"]]
    best = {b: min(kl[name, b] for name in others) for b in about["budgets"]}
    found = ", ".join(f"{times(kl['hads', b] / best[b])} with {b:.0%}" for b in best)
    return f"{found} ({model(about['model'])}, {about['length']} tokens, blocks of {about['block']})"


def chunks() -> str:
    """Reading in chunks: KL, and its ratio to that of reading in one piece."""
    rows, cells, worst = {}, {}, []
    runs = Run.load_all("hads/chunks-")
    for run in runs:
        about, reading = run.settings, run.results["reading"]
        subject = f"{model(about['model'])}, {about['length']} tokens, {len(run.results['texts'])} texts"
        for r in reading:
            rows[run.name, r["chunk"]] = (subject, "one piece" if r["chunk"] is None else f"chunks of {r['chunk']}")
            share = "" if r["chunk"] is None else f" ({times(r['of_one_piece'])})"
            cells[(run.name, r["chunk"]), r["budget"]] = f"{r['kl']:.4f}{share}"
            worst += [] if r["chunk"] is None else r["of_one_piece_per_text"]
    return section(
        grid(("model", "read in"), rows, percents(SHOWN), lambda at, b: cells[at, b]),
        facts(f"On a single text the ratio is {span(worst)}."),
        " ".join(run.source("jax") for run in runs),
    )
