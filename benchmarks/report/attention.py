"""Speed of attention: on a CPU, and on an NVIDIA GPU beside cuDNN, FlexAttention and FlashAttention-4."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.report.words import Row, Run, facts, grid, listing, median, ms, section, span, times, unique
from xsake._ground.words import CALLS, call, kernel
from xsake._race.course import DIRECTIONS
from xsake.autotune.workloads import WORKLOADS

Runs = dict[tuple[str, str, str, float | None], Row]


def cpu_attention() -> str:
    run = Run.load("cpu_attention")

    def peer(r: Row) -> str:
        return ms(r["seconds"]["jax.nn"], 0) if "jax.nn" in r["seconds"] else "not run"

    columns = {
        "tokens": lambda r: str(WORKLOADS[r["workload"]].length),
        "active blocks": "{density:.0%}",
        "direction": "{direction}",
        "XSAKE": lambda r: ms(r["seconds"]["xsake"], 0),
        "jax.nn (XLA)": peer,
        "speed-up": lambda r: times(r["speedup"], 1) if "jax.nn" in r["seconds"] else "",
        "temporary memory": lambda r: " / ".join(f"{n / 2**20:.0f} MiB" for n in r["temporary_bytes"].values()),
    }
    rows = sorted(run.results, key=lambda r: (WORKLOADS[r["workload"]].length, -r["density"], r["direction"]))
    return section(listing(rows, columns), run.source("jax", note=f"{run.content['environment']['cores']} cores"))


def _gpu() -> tuple[Run, Runs, dict[float, str]]:
    """The run, its results, and the densities that were asked for, in words."""
    run = Run.load("gpu_attention")
    by = run.by("workload", "direction", "implementation", "asked")
    return run, by, {d: f"{d:.0%}" for d in sorted({at for *_, who, at in by if who == "xsake"}, reverse=True)}


def _calls(by: Runs) -> dict[tuple[str, str], tuple[str, str]]:
    """Each call in each direction, in words."""
    return {key: (call(key[0]), key[1]) for key in unique(key[:2] for key in by)}


def gpu_speed() -> str:
    """Dense attention's time over ours, for the README."""
    run, by, densities = _gpu()

    def cell(at: tuple[str, str], density: float) -> str:
        ours, dense = (by[*at, who, density]["seconds"]["median"] for who in ("xsake", "cudnn"))
        return times(dense / ours, 1)

    shown = {d: f"{words} of blocks" for d, words in densities.items() if d in (1.0, 0.5, 0.25, 0.1)}
    true = f"The diagonal is always on: at 4096 tokens, 10% asked for are {_true_density(by)}."
    return section(grid(("call", "direction"), _calls(by), shown, cell), f"{true} {run.source('jax')}", _beside_fa4())


def peers() -> Runs:
    rows = [r for run in Run.load_all("gpu_peers_") for r in run.results]
    return {(r["workload"], r["direction"], r["mask"], r["implementation"]): r for r in rows}


def _beside_fa4() -> str:
    """The least and the most of our throughput over FlashAttention-4's with the same mask."""
    by = peers()

    def ratios(direction: str) -> str:
        places = [key[:3] for key in by if key[1] == direction and key[3] == "fa4"]
        return span((by[*at, "xsake"]["tflops"] / by[*at, "fa4"]["tflops"] for at in places), "{:.2f}x")

    return "Over FlashAttention-4 with the same masks: " + ", ".join(f"{ratios(d)} {d}" for d in DIRECTIONS) + "."


def _true_density(by: Runs) -> str:
    return f"{by['gpt4k', 'forward', 'xsake', 0.1]['density']:.1%}"


def gpu_attention() -> str:
    """Throughput on active blocks, and the speed beside cuDNN's dense attention and FlexAttention."""
    run, by, densities = _gpu()

    def cell(at: tuple[str, str], density: float) -> str:
        if (ours := by.get((*at, "xsake", density))) is None:
            return ""
        over = (by[*at, who, density]["seconds"]["median"] / ours["seconds"]["median"] for who in ("cudnn", "flex"))
        return f"{ours['tflops']:.0f} ({', '.join(times(x, 1) for x in over)})"

    table = grid(("call", "direction"), _calls(by), densities, cell)
    return section(table, _gpu_facts(by), run.source("jax", "torch"))


def _gpu_facts(by: Runs) -> str:
    memory = by["gpt4k", "forward+backward", "memory", None]["bytes"]
    uneven = [
        r["tflops"] / by[workload, direction, "xsake uniform", None]["tflops"]
        for (workload, direction, who, _), r in by.items()
        if who == "xsake uneven"
    ]
    errors = record.load("gpu_accuracy")["results"]
    ours, peer = ([r["rms"] for r in errors if r["implementation"] == who] for who in ("xsake", "cudnn"))
    return facts(
        f"A short sequence has more blocks than were asked for, since the diagonal is always on: {_true_density(by)} "
        "for 10% at 4096 tokens.",
        f"Heads that keep from 10% to 90% of their blocks run at {span(uneven)} of the throughput of heads that all "
        "keep the same share.",
        f"Forward+backward at 4096 tokens needs {memory['xsake'] / memory['xla dense']:.0%} of the memory of unfused "
        "attention in XLA.",
        "The error of output and gradients against float64 is at most "
        f"{max(a / b for a, b in zip(ours, peer, strict=True)):.2f} times cuDNN's error.",
    )


def gpu_peers() -> str:
    """Throughput beside FlashAttention-4 with the same masks."""
    by = peers()
    runs = Run.load_all("gpu_peers_")
    masks = unique((workload, mask) for workload, _, mask, _ in by if not mask.startswith("random, as"))
    names = list(CALLS)

    def place(at: tuple[str, str]) -> tuple[int, float]:
        """Calls in the order of their list; random masks first, the densest of them first."""
        density = by[at[0], "forward", at[1], "xsake"]["density"]
        return names.index(at[0]), -density if at[1].startswith("random") else 0

    masks.sort(key=place)
    columns = {
        ("forward", "xsake"): "forward, XSAKE",
        ("forward", "fa4"): "forward, FlashAttention-4",
        ("forward+backward", "xsake"): "forward+backward, XSAKE",
        ("forward+backward", "xsake, any order"): "XSAKE, `deterministic=False`",
        ("forward+backward", "fa4"): "forward+backward, FlashAttention-4",
    }

    def cell(at: tuple[str, str], column: tuple[str, str]) -> str:
        (workload, mask), (direction, who) = at, column
        peer, dense = (by.get((workload, direction, mask, name)) for name in ("fa4", "fa4 dense"))
        if who == "fa4":
            found = ([f"{peer['tflops']:.0f}"] if peer else []) + ([f"{dense['tflops']:.0f} dense"] if dense else [])
            return ", ".join(found)
        own = by[workload, direction, mask, who]["tflops"]
        against = peer or dense
        return f"{own:.0f}" + (f" ({times(own / against['tflops'])})" if against else "")

    clocks = [r["chip"]["sm_mhz"] for r in by.values() if r["chip"]]
    capped = sum("power cap" in r["chip"].get("throttled_by", ()) for r in by.values())
    like_random = [
        by[w, d, mask, "xsake"]["tflops"] / by[w, d, f"random, as {mask}", "xsake"]["tflops"]
        for w, d, mask, who in by
        if who == "xsake" and (w, d, f"random, as {mask}", who) in by
    ]
    return section(
        grid(("call", "mask"), {at: (call(at[0]), at[1]) for at in masks}, columns, cell),
        facts(
            f"HADS's masks run at {span(like_random)} of the throughput of random masks with as many blocks per head.",
            f"Clocks were {span(clocks, '{:.0f}')} MHz; the power cap held in {capped} of {len(by)} races.",
        ),
        runs[0].source("jax", "flash-attn-4", name="gpu_peers_*"),
    )


def gpu_blocks() -> str:
    """Masks of one density with smaller and smaller blocks, and blocks of few queries that are packed."""
    runs = sorted(Run.load_all("gpu_blocks_"), key=lambda run: run.content["environment"]["date"])
    by: dict[tuple, tuple[Row, Row]] = {}  # a row, and that of our blocks of 128 x 128 in the same run
    for run in runs:
        rows = {(*_place(r), r["direction"], r["implementation"]): r for r in run.results if "why" not in r}
        by |= {key: (r, rows[*key[:2], 128, 128, key[4], "xsake"]) for key, r in rows.items()}
    columns = unique((d, who) for d in DIRECTIONS for who in ("xsake", "fa4", "fastvideo"))
    columns = [c for c in columns if any(key[4:] == c for key in by)]

    def cell(at: tuple, column: tuple[str, str]) -> str:
        if (found := by.get((*at, *column))) is None:
            return ""
        r, whole = found
        return f"{r['sustained']['median'] * 1e3:.2f} ms ({r['tflops'] / whole['tflops']:.2f})"

    places = unique(key[:4] for key in by)
    packed, short = Run.load("gpu_packing"), Run.load("gpu_short_gradients")
    first = packed.results[0]
    few, many = sorted({r["block_q"] for r in packed.results})
    of = packed.by("block_q", "asked")
    ratios = [
        of[few, asked]["tflops"][d] / r["tflops"][d] for (n, asked), r in of.items() if n == many for d in DIRECTIONS
    ]
    return section(
        grid(
            ("call", "mask", "queries x keys"),
            {at: (call(at[0]), at[1], f"{at[2]} x {at[3]}") for at in places},
            {c: f"{kernel(c[1])}, {c[0]}" for c in columns},
            cell,
        ),
        facts(
            f"A block of {few} queries is packed with the {first['heads'] // first['kv_heads']} heads of its group: it "
            f"runs at {span(ratios)} of the throughput of blocks of {many} queries (`gpu_packing.json`).",
            f"Forward and gradients, their kernels timed apart, take {_short_gradients(short, 32)} and "
            f"{_short_gradients(short, 16)} (`gpu_short_gradients.json`).",
        ),
        runs[0].source("jax", "flash-attn-4", "fastvideo-kernel", name="gpu_blocks_*"),
    )


def gpu_short_gradients() -> str:
    """Blocks of few keys, kernel by kernel, beside blocks of 128 x 128."""
    run = Run.load("gpu_short_gradients")
    whole = _whole(run)
    columns = {
        "mask": "{mask}",
        "queries x keys": "{block_q} x {block_kv}",
        "forward": lambda r: ms(median(r, "forward")),
        "dQ": lambda r: ms(median(r, "dq")),
        "dK and dV": lambda r: ms(median(r, "dkv")),
        "together": lambda r: f"{ms(_together(r))} ({times(_together(r) / whole[r['mask']])})",
        "gradients by Triton": lambda r: ms(median(r, "triton")) if "triton" in r["seconds"] else "",
    }
    return section(listing(run.results, columns), run.source("jax"))


def _together(r: Row) -> float:
    return sum(median(r, kernel) for kernel in ("forward", "dq", "dkv"))


def _whole(run: Run) -> dict[str, float]:
    """Seconds with blocks of 128 x 128, by kind of mask."""
    return {r["mask"]: _together(r) for r in run.results if (r["block_q"], r["block_kv"]) == (128, 128)}


def _short_gradients(run: Run, block_kv: int) -> str:
    whole = _whole(run)
    ratios = [_together(r) / whole[r["mask"]] for r in run.results if r["block_kv"] == block_kv]
    return f"{span(ratios, '{:.1f}')} times as long with blocks of {block_kv} keys as with 128 x 128"


def _place(r: Row) -> tuple[str, str, int, int]:
    """Workload, kind of mask, queries and keys per block."""
    return r["workload"], r.get("mask", "random"), r["block_q"], r["block_kv"]


def gpu_hops() -> str:
    """A call in the hops of a ring, all on one device, beside the uncut call."""
    run = Run.load("gpu_hops")
    columns = {
        "call": lambda r: call(r["workload"]),
        "shards": "{shards}",
        "density": "{density:.0%}",
        "direction": "{direction}",
        "uncut": lambda r: ms(median(r, "uncut")),
        "all hops of all shards": lambda r: ms(median(r, "hops")),
        "ratio": lambda r: f"{median(r, 'hops') / median(r, 'uncut'):.2f}",
    }
    return section(listing(run.results, columns), run.source("jax"))


def gpu_profile() -> str:
    """What the kernels are busy with and wait for, by the hardware's counters."""
    run = Run.load("gpu_profile")
    columns = {
        "call": lambda r: call(r["workload"]),
        "kernel": _kernel,
        "density": lambda r: f"{r['asked']:.0%}" + ("" if r["block"] == 128 else f", blocks of {r['block']}"),
        "tensor cores": "{tensor_core_share:.0f}%",
        "issue slots": "{issue_slots_share:.0f}%",
        "DRAM": "{dram_share:.0f}%",
        "L2": "{l2_share:.0f}%",
        "L2 hits": "{l2_hit_rate:.0f}%",
        "waits": "{stalled_barrier:.2f} / {stalled_long_scoreboard:.2f} / {stalled_short_scoreboard:.2f}",
    }
    rows = [r for r in run.results if r["tensor_core_share"] > 1]  # others prepare or convert
    return section(listing(rows, columns), run.source(note="cold caches"))


def _kernel(of: dict[str, Any]) -> str:
    what = "forward"
    if of["direction"] != "forward":
        parts = {"dq": "dQ", "dkv": "dK and dV"}
        what = next((name for part, name in parts.items() if f"_{part}_" in of["kernel"]), "dQ, dK and dV")
    return what if of["implementation"] == "xsake" else f"{what}, {kernel(of['implementation'])}"
