"""Reading a prompt and writing after it: first tokens, new tokens, first calls, and how far predictions move."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from benchmarks import record
from benchmarks.report.words import Row, Run, facts, grid, median, ms, section, span, table, times, unique
from xsake._ground.words import DOMAINS, kernel, model

DENSE = "dense by cudnn"


def gpu_prompt() -> str:
    """Time to the first token of a long prompt, whole models: a column for each, with the speed beside cuDNN."""
    run = Run.load("gpu_prompt")
    by = {r["model"]: r for r in run.results}
    ways = unique(_way(way) for r in run.results for way in r["seconds"])

    def cell(way: str, name: str) -> str:
        row = by[name]
        exact = next(one for one in row["seconds"] if _way(one) == way)
        return ms(median(row, exact), 1) + ("" if exact == DENSE else f" ({times(over_dense(row, exact))})")

    heads = {name: f"{named(r)}, {r['length']} tokens" for name, r in by.items()}
    return section(
        grid("read", {way: way for way in ways}, heads, cell),
        facts(*(f"{named(r)}: {cost_of_chunks(r)}." for r in by.values())),
        run.source("jax"),
    )


def _way(way: str) -> str:
    """Without the size of the chunks, which differs from model to model."""
    whole, chunks, _ = way.partition(", chunks")
    return (kernel(whole) if whole == DENSE else whole.replace("dense", "XSAKE, dense")) + (
        ", in chunks" if chunks else ""
    )


def over_dense(row: Row, way: str) -> float:
    return median(row, DENSE) / median(row, way)


def named(row: Row) -> str:
    return model(row["model"]) + ("" if "coder" in row["model"] else ", random weights")


def chunks_over_one_piece(row: Row) -> dict[str, float]:
    """By the way of reading, with its chunks: the time over that of one piece."""
    found = {way: re.fullmatch(r"(.*), chunks of \d+", way) for way in row["seconds"]}
    return {way: median(row, way) / median(row, whole[1]) for way, whole in found.items() if whole}


def cost_of_chunks(row: Row) -> str:
    costs = chunks_over_one_piece(row)
    size = next(iter(costs)).split()[-1]
    said = " and ".join(f"{cost - 1:.0%} with {way.partition(',')[0]}" for way, cost in costs.items())
    share = row["mfu"][DENSE]
    return (
        f"reading in chunks of {size} tokens takes longer than in one piece, by {said}; cuDNN's run reaches "
        f"{share:.0%} MFU"
    )


def gpu_prompt_long() -> str:
    """Time to the first token at lengths where a call takes seconds: a column for each model and length."""
    run = Run.load("gpu_prompt_long")
    by = {(r["model"], r["length"]): r for r in run.results}
    ways = sorted(unique(_way(way) for r in run.results for way in r["seconds"]), key=_by_budget)

    def cell(way: str, at: tuple[str, int]) -> str:
        row = by[at]
        exact = next((one for one in row["seconds"] if _way(one) == way), None)
        if exact is None:
            return ""
        gain = "" if exact == DENSE else f" ({times(over_dense(row, exact))})"
        return f"{whole_seconds(row, exact):.2f} s{gain}"

    heads = {at: f"{model(at[0])}, {at[1]} tokens" for at in by}
    parts = [r for r in run.results if r["layers"] < r["of"]]
    return section(
        grid("read", {way: way for way in ways}, heads, cell),
        facts(
            "Weights are random: the number of blocks is HADS's, and which they are is not. In the table above the "
            "trained model is as fast as the random one.",
            f"Blocks are of {' x '.join(map(str, run.results[0]['blocks']))}.",
            *(
                f"{model(r['model'])}: {r['layers']} of {r['of']} layers were read, once, and the times are "
                f"{r['of'] / r['layers']:g} times theirs."
                for r in parts
            ),
            *(_long_facts(r) for r in run.results if r not in parts),
            *(
                f"Choosing at {r['length']} tokens takes {_choosing(r, 'HADS 10%'):.0%} of a layer of "
                f"{model(r['model'])} at 10%, and {_choosing(r, 'HADS 5%'):.0%} at 5%."
                for r in run.results
                if r["length"] == max(one["length"] for one in run.results)
            ),
        ),
        run.source("jax"),
    )


def _by_budget(way: str) -> tuple[bool, int]:
    """One piece before chunks, and the larger budget first."""
    found = re.search(r"(\d+)%", way)
    return "chunks" in way, -int(found[1]) if found else -101


def whole_seconds(row: Row, way: str) -> float:
    """The seconds of all layers, in proportion where only some were read."""
    return median(row, way) * row["of"] / row["layers"]


def _long_facts(row: Row) -> str:
    said = f"{model(row['model'])}, {row['length']} tokens: at most {row['peak'] / 1e9:.1f} GB were in use"
    costs = chunks_over_one_piece(row)
    if not costs:
        return f"{said}."
    size = next(iter(costs)).split()[-1]
    chunks = " and ".join(f"{cost - 1:.1%} with {way.partition(',')[0]}" for way, cost in costs.items())
    return f"{said}; chunks of {size} tokens take longer than one piece by {chunks}."


def _choosing(row: Row, way: str) -> float:
    """The share of the choice's kernels."""
    found = row["kernels"][way]
    return sum(k["seconds"] for name, k in found["kernels"].items() if name.startswith("hads")) / found["busy"]


def kernels_of_chunks() -> str:
    """Kernels of the first model of the record, with HADS, in one piece and in chunks: milliseconds and launches."""
    run = Run.load("gpu_prompt")
    return section(kernel_table(run.results[0]["kernels"]), run.source("jax"))


def kernel_table(kernels: Row) -> str | None:
    for way, found in kernels.items():
        before = kernels.get(way.partition(", chunks")[0])
        if ", chunks" not in way or way.startswith("dense") or found is None or before is None:
            continue
        both = (before, found)
        rows = [
            [f"`{name}`", *(_launches(one["kernels"].get(name), "seconds") for one in both)]
            for name in unique([*before["kernels"], *found["kernels"]])
        ]
        return table(["kernel", "one piece", "chunks"], [*rows, ["all", *(_launches(one, "busy") for one in both)]])
    return None


def _launches(found: Row | None, seconds: str) -> str:
    return "" if found is None else f"{found[seconds] * 1e3:.1f} ms ({found['launches']})"


def gpu_decode() -> str:
    """One layer's attention of one new token: times, and the share of the copy bandwidth."""
    run = Run.load("gpu_decode")
    by = run.by("heads", "batch")
    columns = {
        "dense": "XSAKE, dense",
        DENSE: "cuDNN, dense",
        "sparse": "XSAKE, 10% of the blocks",
        "": "dense over sparse",
    }

    def cell(at: tuple[str, int], what: str) -> str:
        row = by[at]
        if not what:
            return times(median(row, "dense") / median(row, "sparse"), 1)
        return f"{median(row, what) * 1e6:.1f} µs ({bandwidth_share(row, what):.0%})"

    single = [r for r in run.results if r["batch"] == 1]
    read = span((r["bytes"]["sparse"] / 1e6 for r in single), "{:.0f} MB")
    alone = span((r["bytes"]["sparse"] / _bandwidth(r, "copy") * 1e6 for r in single), "{:.0f} µs")
    took = span((median(r, "sparse") * 1e6 for r in single), "{:.0f} µs")
    slower = [median(r, "dense") / median(r, DENSE) - 1 for r in run.results]
    return section(
        grid(("model", "batch"), {at: (model(at[0]), str(at[1])) for at in by}, columns, cell),
        facts(
            f"A call has a least time, however little it reads: at batch 1 the sparse calls read {read}, which a copy "
            f"moves in {alone}, and take {took}. So sparsity gains least there.",
            f"XSAKE's dense attention is slower than cuDNN's in {sum(x > 0 for x in slower)} of {len(slower)} calls, "
            f"by up to {max(slower):.0%}.",
        ),
        run.source("jax"),
    )


def _bandwidth(row: Row, what: str) -> float:
    return row["bytes"][what] / median(row, what)


def bandwidth_share(row: Row, what: str) -> float:
    return _bandwidth(row, what) / _bandwidth(row, "copy")


def gpu_generate() -> str:
    """New tokens per second after a long prompt; nothing as long as nothing was recorded."""
    if record.find("gpu_generate") is None:
        return ""
    run = Run.load("gpu_generate")
    by = {r["batch"]: r for r in run.results}
    columns = {way: way for way in run.results[0]["seconds"]}

    def cell(batch: int, way: str) -> str:
        seconds = median(by[batch], way)
        gain = "" if way == "dense" else f", {times(median(by[batch], 'dense') / seconds)}"
        return f"{batch / seconds:.0f} ({ms(seconds)}{gain})"

    bound = ", ".join(
        f"{times(1 + r['bytes']['cache'] / r['bytes']['weights'], 1)} at batch {n}" for n, r in by.items()
    )
    return section(
        grid("batch", {batch: str(batch) for batch in by}, columns, cell),
        facts(f"Counting only the bytes of weights and cache, a step that read no cache would gain at most {bound}."),
        run.source("jax"),
    )


def gpu_generate_quality() -> str:
    """How far predictions move while tokens are written; nothing as long as nothing was recorded."""
    if record.find("gpu_generate_quality") is None:
        return ""
    run = Run.load("gpu_generate_quality")
    kinds = {name: DOMAINS.get(name, name) for name in unique(r["domain"] for r in run.results)} | {"": "**all**"}
    budgets = unique(r["budget"] for r in run.results)

    def cell(kind: str, column: tuple[str, float]) -> str:
        what, budget = column
        found = [r[what] for r in run.results if kind in ("", r["domain"]) and r["budget"] == budget]
        return f"{np.mean(found):.4f}" if what == "kl" else f"{np.mean(found):.1%}"

    columns = {
        (w, b): f"{words} at {b:.0%}" for b in budgets for w, words in (("kl", "KL"), ("same_token", "same token"))
    }
    worst = ", ".join(
        f"{max(r['largest_kl'] for r in run.results if r['budget'] == b):.1f} at {b:.0%}" for b in budgets
    )
    return section(
        grid("text", kinds, columns, cell),
        facts(f"The largest KL of a single token is {worst}."),
        run.source("jax"),
    )


def gpu_first_call() -> str:
    """Seconds until a call's result is there, at lengths that are new to the process."""
    run = Run.load("gpu_first_call")
    by = run.by("call", "implementation")
    calls = unique(name for name, _ in by)
    names = {"xsake": "XSAKE", "cudnn": "cuDNN"}
    return section(
        grid("call", {c: c for c in calls}, names, lambda c, who: _seconds(by[c, who]["seconds"])),
        run.source("jax"),
    )


def _seconds(found: Sequence[float]) -> str:
    if max(found) < 0.1:
        return f"{span([x * 1e3 for x in found], '{:.0f}')} ms"
    return f"{span(found, '{:.1f}' if max(found) > 1 else '{:.2f}')} s"
