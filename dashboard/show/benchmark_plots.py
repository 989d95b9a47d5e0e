"""What is plotted of each record. A record without a function here is shown as tables alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from xsake._ground.words import TASKS, call, in_words, kernel, model
from xsake.dashboard.show.benchmark_tables import spread

Row = dict[str, Any]
Plot = dict[str, Any]


def plots(identity: str, record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    """Plots of a record, and sentences that belong to them."""
    for prefix, function in _PLOTS.items():
        if identity == prefix or identity.startswith(f"{prefix}-") or identity.startswith(f"{prefix}_"):
            return function(record)
    return [], []


def role(name: str) -> str:
    """The role of a kernel or a method, by its name in a record or in words.

    >>> [role(name) for name in ("xsake block 64", "HADS", "oracle_gain", "cudnn", "dense")]
    ['ours', 'ours', 'reference', 'peer', 'reference']
    """
    first = name.lower()
    if first.startswith(("xsake", "hads", "ours")):
        return "ours"
    return "reference" if first.startswith(("oracle", "dense", "heuristic")) else "peer"


def axis(title: str, unit: str | None = None, *, log: bool = False, **more: Any) -> dict[str, Any]:
    return {"title": title, "unit": unit, "log": log, **more}


def line(
    identity: str, title: str, x: dict[str, Any], y: dict[str, Any], rows: Iterable[tuple[str, Any, Any]]
) -> Plot | None:
    """A plot of (series, x, y with or without quartiles); None if there is no point."""
    series: dict[str, list[dict[str, Any]]] = {}
    for name, at, value in rows:
        if at is not None and (point := spread(value)) is not None:
            series.setdefault(name, []).append({"x": at, **point})
    if not series:
        return None
    return {
        "id": identity,
        "title": title,
        "kind": "line",
        "x": x | {"categories": None},
        "y": y,
        "series": [
            {"name": name, "role": role(name), "points": sorted(points, key=lambda p: p["x"])}
            for name, points in series.items()
        ],
    }


def bars(identity: str, title: str, x_title: str, y: dict[str, Any], rows: Iterable[tuple[str, str, Any]]) -> Plot:
    """A plot of (series, category, y with or without quartiles)."""
    rows = list(rows)
    categories = list(dict.fromkeys(category for _, category, _ in rows))
    numbered = [(name, categories.index(category), value) for name, category, value in rows]
    made = line(identity, title, axis(x_title), y, numbered) or {"series": []}
    return made | {
        "id": identity,
        "title": title,
        "kind": "bar",
        "y": y,
        "x": axis(x_title) | {"categories": categories},
    }


def _groups(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def _time(**more: Any) -> dict[str, Any]:
    return axis("time", "s", log=True, better="lower", **more)


def _over_density(rows: Iterable[Row], left_out: Iterable[str], seconds: str) -> list[Plot | None]:
    """A plot per call and direction, with a line per kernel."""
    made: list[Plot | None] = []
    kept = [row for row in rows if row["implementation"] not in left_out]
    for (workload, direction), mine in _groups(kept, "workload", "direction").items():
        points = [(kernel(row["implementation"]), row.get("density"), row.get(seconds)) for row in mine]
        title = f"{call(workload)}, {direction}"
        made.append(line(f"{workload}-{direction}", title, axis("density of the mask"), _time(), points))
    return made


def _gpu_attention(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made = _over_density(record["results"], ("xsake uneven", "xsake uniform"), "seconds")
    notes = ["Medians of the rounds with their quartiles. cuDNN and JAX's Pallas kernels compute all blocks."]
    return _there(made), notes


def _gpu_peers(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made = _over_density(record["results"], ("fa4 dense, deterministic",), "sustained")
    return _there(made), ["Kernels took turns in random order, in sustained runs; quartiles over rounds."]


def _gpu_decode(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    names = {"dense": "XSAKE, dense", "sparse": "XSAKE, 10% of the blocks", "dense by cudnn": kernel("cudnn")}
    rows = [
        (names[what], f"{model(row['heads'])}, batch {row['batch']}", value)
        for row in record["results"]
        for what, value in row["seconds"].items()
        if what in names  # the copy is of other bytes
    ]
    return [bars("times", "Time of one layer's attention", "heads and batch", _time(), rows)], []


def _gpu_generate(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    rows = [(way, f"{row['batch']}", value) for row in record["results"] for way, value in row["seconds"].items()]
    return [bars("times", "Time of a token of every sequence", "sequences", _time(), rows)], []


def _generate_quality(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    kl = axis("KL from dense", "nats per token", log=True, better="lower")
    rows = [(f"HADS {row['budget']:.0%}", row["text"], row["kl"]) for row in record["results"]]
    return [bars("kl", "Divergence while tokens are written", "text", kl, rows)], []


_CHOICES = {"scored": "blocks by score", "uniform": "blocks at random"}


def _gpu_selection(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made: list[Plot | None] = []
    for direction in ("forward", "forward+backward"):
        rows = []
        for row in record["results"]:
            call = f"{row['tokens']} tokens, {row['group']} heads per K/V head"
            names = {
                f"selected, {direction}": f"XSAKE, {_CHOICES.get(row['choice'], row['choice'])}",
                f"whole, {direction}": "XSAKE, the whole operation",
                f"dense cudnn, {direction}": kernel("cudnn"),
            }
            rows += [(names[what], call, value) for what, value in row["seconds"].items() if what in names]
        made.append(bars(f"times-{direction}", f"Time per call, {direction}", "call", _time(), rows))
    return _there(made), []


def _ruler(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made: list[Plot | None] = []
    for (length,), found in _groups(record["scores"], "length").items():
        dense = [way for way in found if way["method"] == "dense"]
        for (budget,), ways in _groups([way for way in found if way not in dense], "budget").items():
            rows = [
                (in_words(way["method"]), TASKS.get(task, task), score)
                for way in dense + ways
                for task, score in way["tasks"].items()
            ]
            title = f"{length} tokens, {budget:.0%} of the blocks"
            y = axis("score", "%", better="higher")
            made.append(bars(f"scores-{length}-{budget:g}", title, "task", y, rows))
    return _there(made), ["A task without a bar was not run. The average is over the tasks that were run."]


def _cpu_attention(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    rows = [
        (kernel(name), f"{call(row['workload'])}, {row['direction']}, density {row['density']:.0%}", value)
        for row in record["results"]
        for name, value in row["seconds"].items()
    ]
    return [bars("times", "Time per call", "call", _time(), rows)], []


def _gpu_accuracy(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    y = axis("root mean square error against float64", None, log=True, better="lower")
    rows = [
        (kernel(row["implementation"]), f"{row['of']}, {row['dtype']}, heads of {row['head_dim']}", row["rms"])
        for row in record["results"]
    ]
    return [bars("rms", "Errors of output and gradients", "what", y, rows)], []


def _gpu_profile(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    y = axis("share of the peak", "%", better="higher")
    rows = [
        (name.replace("_", " "), f"{row['kernel']}, {call(row['workload'])}, density {row['asked']:.0%}", row.get(name))
        for row in record["results"]
        for name in ("tensor_core_share", "dram_share", "l2_share", "issue_slots_share")
    ]
    return [bars("shares", "How busy the chip is", "workload", y, rows)], []


def _mask_cost(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made: list[Plot | None] = []
    for part in ("mask and attention", "mask", "attention"):
        for budget in ("10%", "20%", "43%"):
            rows = [
                (
                    kernel(row["what"].removeprefix(f"{part}: ").removesuffix(f" at {budget}")),
                    row["length"],
                    row["seconds"],
                )
                for row in record["results"]
                if row["what"].startswith(f"{part}: ") and row["what"].endswith(f" at {budget}")
            ]
            dense = [
                ("dense attention", row["length"], row["seconds"])
                for row in record["results"]
                if row["what"] == "dense"
            ]
            title = f"{part[0].upper()}{part[1:]} at {budget} of the blocks"
            made.append(
                line(f"{part}-{budget}", title, axis("tokens", log=True), _time(), rows + dense if rows else [])
            )
    return _there(made), []


def _hads(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    kl = axis("KL from the dense model", "nats per token", log=True, better="lower")
    share = axis("share of the blocks")
    title = "Distance from the dense model"
    if "methods" not in record:  # the comparison with an earlier version
        points = [(in_words(row["method"]), row["active_blocks"], row["kl"]) for row in record["results"]]
        return _there([line("kl", title, share, kl, points)]), []
    methods = [row for row in record["methods"] if row["layers"] == "profile"]
    is_rival = _is_rival if any(_is_rival(row["method"]) for row in methods) else _is_forced_rival
    shown = _shown(methods, {task["method"] for task in record["tasks"]})
    points = [(in_words(row["method"]), row["budget"], row["kl"]) for row in methods if row["method"] in shown]
    made = [line("kl", title, share, kl, points)]
    for budget in sorted({row["budget"] for row in methods if row["against"]}):
        differences = [
            ("HADS minus the method", in_words(row["method"]), _interval(row))
            for row in methods
            if row["budget"] == budget and row["against"] and is_rival(row["method"])
        ]
        title = f"HADS minus each method, {budget:.0%} of the blocks"
        y = axis("KL of HADS minus that of the method", "nats per token", better="lower")
        made.append(bars(f"against-{budget:g}", title, "method", y, differences))
    for (domain,), rows in _groups(record["tasks"], "domain").items():
        points = [(in_words(row["method"]), row["budget"], row["retention"]) for row in rows if row["method"] in shown]
        kept = axis("answers kept", better="higher")
        made.append(
            line(
                f"task-{domain}",
                f"Answers that are kept: {domain.split('-')[0].replace('_', ' in the ')}",
                share,
                kept,
                points,
            )
        )
    notes = [
        "All methods keep equally many blocks in every layer. Lines are HADS, the oracle of its rule, and the four "
        "rivals that were asked for answers or are nearest, each in one form; the table has all methods.",
        "In the differences, intervals are 95% intervals of a paired bootstrap over documents, not quartiles; below 0, "
        "HADS is nearer to the dense model.",
    ]
    texts = sorted({row["sequences"] for row in methods})
    if len(texts) > 1:
        notes.append(
            f"Methods have read {texts[0]} to {texts[-1]} texts. The first plot has each method's own texts; the "
            "differences are of the texts that HADS and the method have both read."
        )
    return _there(made), notes


def _there(made: list[Plot | None]) -> list[Plot]:
    return [plot for plot in made if plot is not None and plot["series"]]


def _is_rival(method: str) -> bool:
    """Our version of another method, or a pattern: no variant of HADS, no oracle, none of HADS's forced blocks."""
    return role(method) == "peer" and not method.endswith("+forced")


def _is_forced_rival(method: str) -> bool:
    """Of a study in which rivals ran with HADS's forced blocks alone."""
    return role(method) == "peer" and method.endswith("+forced")


def _shown(methods: list[Row], asked: set[str], rivals: int = 4) -> list[str]:
    """HADS, the oracle of its rule, and rivals: first those that were asked for answers, then the nearest to the dense
    model; none with and without forced blocks."""
    logs: dict[str, list[float]] = {}
    for row in methods:
        if role(row["method"]) == "peer":
            logs.setdefault(row["method"], []).append(math.log(max(row["kl"], 1e-9)))
    order = sorted(logs, key=lambda name: (name not in asked, sum(logs[name]) / len(logs[name])))
    forms: dict[str, str] = {}
    for name in order:
        forms.setdefault(in_words(name).split(" + forced")[0].split(",")[0], name)
    return ["hads", "oracle_gain", *list(forms.values())[:rivals]]


def _interval(row: Row) -> dict[str, Any]:
    against = row["against"]
    return {"median": against["mean"], "low": against["low"], "high": against["high"], "rounds": row["sequences"]}


def _smollm2(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    rows = [("perplexity", window["start"], window["perplexity"]) for window in record["results"]["windows"]]
    made = line(
        "perplexity", "Perplexity by window of the text", axis("first token"), axis("perplexity", better="lower"), rows
    )
    return _there([made]), []


def _tpu_schedule(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    rows = [
        (
            name.removeprefix("over_").replace("_", ", "),
            f"{row['topology']}, D {row['head_dim']}{', causal' * row['causal']}",
            row[name],
        )
        for row in record["results"]["totals"]
        for name in ("over_splash_plain", "over_splash_strict")
    ]
    y = axis("cycles over those of splash attention", None, better="lower")
    return [bars("splash", "Cycles beside splash attention", "chip and head", y, rows)], [
        "Cycles of the compiler's schedules; no TPU ran them."
    ]


def _train_gpu(record: dict[str, Any]) -> tuple[list[Plot], list[str]]:
    made: list[Plot | None] = []
    times = [
        (kernel(row["kind"]), f"{model(row['preset'])}, {row['length']} tokens", row["seconds"])
        for row in record["results"]
    ]
    made.append(bars("step", "Time of a step", "model", axis("time", "s", better="lower"), times))
    loss = axis("held-out loss", "nats per token", log=True, better="lower")
    for (preset,), rows in _groups(record["results"], "preset").items():
        points = [(kernel(row["kind"]), step, value) for row in rows for step, value in row.get("held_out_losses", [])]
        made.append(line(f"held-{preset}", f"{model(preset)}: held-out loss", axis("step"), loss, points))
    return _there(made), ["Quartiles over the steps of a run, or over the rounds of a race."]


_PLOTS: dict[str, Callable[[dict[str, Any]], tuple[list[Plot], list[str]]]] = {
    "gpu_attention": _gpu_attention,
    "gpu_peers": _gpu_peers,
    "gpu_decode": _gpu_decode,
    "gpu_generate_quality": _generate_quality,  # before the shorter name
    "gpu_generate": _gpu_generate,
    "gpu_selection": _gpu_selection,
    "ruler": _ruler,
    "cpu_attention": _cpu_attention,
    "gpu_accuracy": _gpu_accuracy,
    "gpu_profile": _gpu_profile,
    "hads_mask_cost": _mask_cost,
    "hads": _hads,
    "smollm2": _smollm2,
    "tpu_schedule": _tpu_schedule,
    "train_gpu": _train_gpu,
}
