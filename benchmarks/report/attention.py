"""Speed of attention: on a CPU, and on an NVIDIA GPU beside cuDNN and torch FlexAttention."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.report.words import milliseconds, source, table
from xsake.autotune.workloads import WORKLOADS, Workload

Runs = dict[tuple[str, str, str, float | None], dict[str, Any]]


def cpu_attention() -> str:
    run = record.load("cpu_attention")
    rows = []
    for r in run["results"]:
        peer, used = r["seconds"].get("jax.nn"), r["temporary_bytes"]
        rows.append(
            [
                str(WORKLOADS[r["workload"]].length),
                r["direction"],
                f"{r['density']:.0%}",
                milliseconds(r["seconds"]["xsake"]),
                milliseconds(peer) if peer else "not run",
                f"{r['speedup']:.1f}x" if peer else "",
                " against ".join(f"{n / 2**20:.0f} MiB" for n in used.values()),
            ]
        )
    heads = ["tokens", "direction", "active blocks", "xsake", "jax.nn (xla)", "speed-up", "temporary memory"]
    origin = source("cpu_attention.json", run, "jax", note=f"{run['environment']['cores']} cores")
    return "\n".join([*table(heads, rows), "", f"Times are medians with quartiles. {origin}"])


def _gpu() -> tuple[dict[str, Any], Runs, list[float]]:
    """The run, its results by (workload, direction, implementation, density asked for), and these densities."""
    run = record.load("gpu_attention")
    by = {(r["workload"], r["direction"], r["implementation"], r.get("asked")): r for r in run["results"]}
    return run, by, sorted({asked for *_, who, asked in by if who == "xsake"}, reverse=True)


def gpu_speed() -> str:
    """Dense attention's time over ours, for the README."""
    run, by, densities = _gpu()
    densities = [d for d in densities if d in (1.0, 0.5, 0.25, 0.1)]
    rows = []
    for name, direction in dict.fromkeys((workload, direction) for workload, direction, *_ in by):
        dense, ours = (
            [by[name, direction, who, d]["seconds"]["median"] for d in densities] for who in ("cudnn", "xsake")
        )
        times = (f"{theirs / mine:.1f}x" for theirs, mine in zip(dense, ours, strict=True))
        rows.append([_about(WORKLOADS[name]), direction, *times])
    lines = table(["call", "direction", *(f"{d:.0%} of blocks" for d in densities)], rows)
    true = f"The diagonal is always on: at 4096 tokens, 10% asked for are {_true_density(by)}."
    return "\n".join([*lines, "", f"{true} {source('gpu_attention.json', run, 'jax')}", "", _beside_fa4()])


def _beside_fa4() -> str:
    """The least and the most of our throughput over FlashAttention-4's with the same mask."""
    results = [r for run in record.load_all("gpu_peers_").values() for r in run["results"]]
    by = {(r["direction"], r["workload"], r["mask"], r["implementation"]): r["tflops"] for r in results}
    ranges = {}
    for direction in ("forward", "forward+backward"):
        places = [key[:3] for key in by if key[0] == direction and key[3] == "fa4"]
        ratios = [by[*place, "xsake"] / by[*place, "fa4"] for place in places]
        ranges[direction] = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
    return "Over FlashAttention-4 with the same masks: " + ", ".join(f"{x} {name}" for name, x in ranges.items()) + "."


def _true_density(by: Runs) -> str:
    return f"{by['gpt4k', 'forward', 'xsake', 0.1]['density']:.1%}"


def _about(workload: Workload) -> str:
    grouped = "" if workload.q_heads == workload.kv_heads else f" on {workload.kv_heads}"
    causal = ", causal" if workload.is_causal else ""
    return (
        f"{workload.batch} x {workload.length} tokens, {workload.q_heads} heads{grouped}, D {workload.head_dim}{causal}"
    )


def gpu_attention() -> str:
    """Throughput on active blocks, over cuDNN's dense throughput and over FlexAttention at the same mask."""
    run, by, densities = _gpu()
    names = list(dict.fromkeys(workload for workload, *_ in by))
    calls = "; ".join(f"`{name}`: {_about(WORKLOADS[name])}" for name in names)
    rows = []
    for name, direction in dict.fromkeys((workload, direction) for workload, direction, *_ in by):
        cells = []
        for d in densities:
            ours = by.get((name, direction, "xsake", d))
            if ours is None:
                cells.append("")
                continue
            dense, flex = by[name, direction, "cudnn", d], by[name, direction, "flex", d]
            over = f"{ours['tflops'] / dense['tflops']:.2f}, {ours['tflops'] / flex['tflops']:.2f}"
            cells.append(f"{ours['tflops']:.0f} ({over})")
        rows.append([f"{name}, {direction}", *cells])
    lines = table(["call, direction", *(f"{d:.0%}" for d in densities)], rows)
    return "\n".join(
        [
            f"The calls, bfloat16: {calls}.",
            "",
            *lines,
            "",
            *_gpu_facts(by),
            "",
            source("gpu_attention.json", run, "jax", "torch"),
        ]
    )


def _gpu_facts(by: Runs) -> list[str]:
    latency = {d: by["gpt4k", d, "xsake", 0.43]["seconds"]["median"] for d in ("forward", "forward+backward")}
    dense = {d: by["gpt4k", d, "cudnn", 0.43]["seconds"]["median"] for d in latency}
    saved = ", ".join(f"{d} {1 - latency[d] / dense[d]:.0%}" for d in latency)
    memory = by["gpt4k", "forward+backward", "memory", None]["bytes"]
    uneven = [
        r["tflops"] / by[workload, direction, "xsake uniform", None]["tflops"]
        for (workload, direction, who, _), r in by.items()
        if who == "xsake uneven"
    ]
    small = [
        r["tflops"] / by[workload, direction, "xsake", asked]["tflops"]
        for (workload, direction, who, asked), r in by.items()
        if who == "xsake block 64"
    ]
    errors = record.load("gpu_accuracy")["results"]
    ours, peer = ([r["rms"] for r in errors if r["implementation"] == who] for who in ("xsake", "cudnn"))
    return [
        f"- The columns name the density asked for. The diagonal is always on, which makes the true density higher on "
        f"short sequences: {_true_density(by)} for 10% at 4096 tokens.",
        f"- At 4096 tokens and 43%, the latency is lower than that of cuDNN's dense attention by: {saved}.",
        f"- Forward+backward at 4096 tokens needs {memory['xsake'] / memory['xla dense']:.0%} of the memory of unfused "
        f"attention in XLA.",
        f"- With heads from 10% to 90%, the throughput is {min(uneven):.2f} to {max(uneven):.2f} of the throughput of "
        f"a uniform mask.",
        f"- With mask blocks of 64, the throughput is {min(small):.2f} to {max(small):.2f} of the throughput with "
        f"blocks of 128.",
        f"- The error against float64, of output and gradients, is at most "
        f"{max(a / b for a, b in zip(ours, peer, strict=True)):.2f} times cuDNN's error.",
    ]


def gpu_peers() -> str:
    """Sustained throughput beside FlashAttention-4 on the same mask, and the dense peers."""
    runs = record.load_all("gpu_peers_")
    results = [r for run in runs.values() for r in run["results"]]
    by = {(r["workload"], r["direction"], r["mask"], r["implementation"]): r for r in results}
    heads = {
        "xsake": "xsake",
        "xsake, any order": "any order",
        "xsake, blocks of 64": "blocks of 64",
        "fa4": "FlashAttention-4",
        "cudnn dense": "cuDNN dense",
        "fa4 dense": "FlashAttention-4 dense",
        "fa4 dense, deterministic": "FlashAttention-4 dense, deterministic",
    }
    names = [name for name in heads if any(key[-1] == name for key in by)]
    rows = []
    for place in dict.fromkeys(key[:3] for key in by):
        peer = by.get((*place, "fa4"), by.get((*place, "fa4 dense")))
        cells = []
        for name in names:
            found = by.get((*place, name))
            compared = found and peer and not name.startswith("fa4")
            against = f" ({found['tflops'] / peer['tflops']:.2f})" if compared else ""
            cells.append(f"{found['tflops']:.0f}{against}" if found else "")
        rows.append([", ".join(place[:2]), place[2], *cells])
    clocks = [r["chip"]["sm_mhz"] for r in by.values() if r["chip"]]
    capped = sum("power cap" in r["chip"].get("throttled_by", ()) for r in by.values())
    state = (
        f"Clocks were {min(clocks):.0f} to {max(clocks):.0f} MHz; the power cap held in {capped} of {len(by)} races."
    )
    sources = [source(f"{name}.json", run, "jax", "flash-attn-4") for name, run in runs.items()]
    others: dict[str, dict[str, None]] = {}
    for (workload, _, mask, _), r in by.items():
        if "commit" in r:
            others.setdefault(r["commit"][:7], {})[f"{workload} with {mask}"] = None
    also = [f"Of commit {commit}: {'; '.join(places)}." for commit, places in others.items()]
    titles = ["call, direction", "mask", *(heads[name] for name in names)]
    return "\n".join([*table(titles, rows), "", " ".join([state, *sources, *also])])


def gpu_blocks() -> str:
    """Random masks of one density with smaller and smaller blocks."""
    runs = record.load_all("gpu_blocks_")
    names = {"xsake": "xsake", "fa4": "FlashAttention-4", "fastvideo": "FastVideo"}
    lines: list[str] = []
    for name, run in runs.items():
        by = {(r["direction"], r["implementation"], r["block_q"], r["block_kv"]): r for r in run["results"]}
        columns = [
            (d, who) for d in ("forward", "forward+backward") for who in names if any(k[:2] == (d, who) for k in by)
        ]
        first = by["forward", "xsake", 128, 128]
        rows = [
            [f"{q} x {kv}", *(_of_blocks(by, d, who, q, kv) for d, who in columns)]
            for q, kv in dict.fromkeys(key[2:] for key in by)
        ]
        heads = ["queries x keys", *(f"{names[who]}, {direction}" for direction, who in columns)]
        refused = [
            f"{names[r['implementation']]}, {r['direction']}, {r['block_q']} x {r['block_kv']}: {r['why']}"
            for r in run["results"]
            if "why" in r
        ]
        lines += [
            f"`{first['workload']}`, {first['density']:.0%} of the blocks:",
            "",
            *table(heads, rows),
            "",
            *(f"- Left out: {words}" for words in refused),
            source(f"{name}.json", run, "jax", "flash-attn-4", "fastvideo-kernel"),
            "",
        ]
    return "\n".join(lines[:-1])


def _of_blocks(by: dict[tuple, dict[str, Any]], direction: str, who: str, q: int, kv: int) -> str:
    """Milliseconds, and the throughput over ours with blocks of 128."""
    r = by.get((direction, who, q, kv))
    if r is None or "why" in r:
        return ""
    share = r["tflops"] / by[direction, "xsake", 128, 128]["tflops"]
    return f"{r['sustained']['median'] * 1e3:.2f} ms ({share:.2f})"


def gpu_hops() -> str:
    """A call in the hops of a ring, all on one device, beside the uncut call."""
    run = record.load("gpu_hops")
    rows = []
    for r in run["results"]:
        uncut, hops = (r["seconds"][name]["median"] for name in ("uncut", "hops"))
        times = [f"{seconds * 1e3:.2f} ms" for seconds in (uncut, hops)]
        rows.append(
            [r["workload"], str(r["shards"]), f"{r['density']:.0%}", r["direction"], *times, f"{hops / uncut:.2f}"]
        )
    heads = ["call", "shards", "density", "direction", "uncut", "all hops of all shards", "ratio"]
    return "\n".join([*table(heads, rows), "", source("gpu_hops.json", run, "jax")])


def gpu_profile() -> str:
    """What the kernels are busy with and wait for, by the hardware's counters."""
    run = record.load("gpu_profile")
    shares = ("tensor_core_share", "issue_slots_share", "dram_share", "l2_share", "l2_hit_rate")
    waits = ("stalled_barrier", "stalled_long_scoreboard", "stalled_short_scoreboard")
    rows = [
        [
            f"{r['workload']}, {_kernel(r)}",
            f"{r['asked']:.0%}" + ("" if r["block"] == 128 else f", blocks of {r['block']}"),
            *(f"{r[name]:.0f}%" for name in shares),
            " / ".join(f"{r[name]:.2f}" for name in waits),
        ]
        for r in run["results"]
        if r["tensor_core_share"] > 1  # others prepare or convert
    ]
    heads = ["kernel", "density", "tensor cores", "issue slots", "DRAM", "L2", "L2 hits", "waits"]
    return "\n".join([*table(heads, rows), "", source("gpu_profile.json", run, note="cold caches")])


def _kernel(of: dict) -> str:
    if of["direction"] == "forward":
        what = "forward"
    else:
        parts = {"dq": "dQ", "dkv": "dK and dV"}
        what = next((name for part, name in parts.items() if f"_{part}_" in of["kernel"]), "dQ, dK and dV")
    return what if of["implementation"] == "xsake" else f"{what} by FlashAttention-4"
