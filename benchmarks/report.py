"""The README's tables, made from recorded runs.

python -m benchmarks.report           rewrite the generated parts of README.md
python -m benchmarks.report --check   exit 1 if they are not what the recorded runs say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from benchmarks import record
from benchmarks.report_hads import hads_study
from xsake._tuned import kernel_hash
from xsake.autotune.report import FASTER, SAME
from xsake.autotune.workloads import WORKLOADS

README = record.ROOT / "README.md"
SOURCES = {"measured": "races on the device", "schedule": "cycles of the compiler's schedules"}


def cpu_attention() -> str:
    run = record.load("cpu_attention")
    rows = [
        "| tokens | direction | active blocks | xsake | jax.nn (xla) | speed-up | temporary memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in run["results"]:
        peer, used = r["seconds"].get("jax.nn"), r["temporary_bytes"]
        cells = [
            str(WORKLOADS[r["workload"]].length),
            r["direction"],
            f"{r['density']:.0%}",
            _ms(r["seconds"]["xsake"]),
            _ms(peer) if peer else "not run",
            f"{r['speedup']:.1f}x" if peer else "",
            " against ".join(f"{n / 2**20:.0f} MiB" for n in used.values()),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", _source(run, "cpu_attention")])


def gpu_attention() -> str:
    """Throughput on active blocks, over cuDNN's dense throughput and over FlexAttention at the same mask."""
    run = record.load("gpu_attention")
    by = {(r["workload"], r["direction"], r["implementation"], r.get("asked")): r for r in run["results"]}
    densities = sorted({key[3] for key in by if key[2] == "xsake"}, reverse=True)
    rows = [
        f"| workload, direction | {' | '.join(f'{d:.0%}' for d in densities)} |",
        f"| --- |{' --- |' * len(densities)}",
    ]
    for workload, direction in dict.fromkeys((key[0], key[1]) for key in by):
        cells = []
        for d in densities:
            ours = by.get((workload, direction, "xsake", d))
            if ours is None:
                cells.append("")
                continue
            dense, flex = by[workload, direction, "cudnn", d], by[workload, direction, "flex", d]
            over = f"{ours['tflops'] / dense['tflops']:.2f}, {ours['tflops'] / flex['tflops']:.2f}"
            cells.append(f"{ours['tflops']:.0f} ({over})")
        rows.append(f"| {workload}, {direction} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *_gpu_facts(by), "", _source(run, "gpu_attention")])


def _gpu_facts(by: dict) -> list[str]:
    latency = {d: by["gpt4k", d, "xsake", 0.43]["seconds"]["median"] for d in ("forward", "forward+backward")}
    dense = {d: by["gpt4k", d, "cudnn", 0.43]["seconds"]["median"] for d in latency}
    saved = ", ".join(f"{d} {1 - latency[d] / dense[d]:.0%}" for d in latency)
    memory = by["gpt4k", "forward+backward", "memory", None]["bytes"]
    uneven = []
    for (workload, direction, who, _), r in by.items():
        if who == "xsake uneven":
            uneven.append(r["tflops"] / by[workload, direction, "xsake uniform", None]["tflops"])
    small = [
        r["tflops"] / by[w, d, "xsake", asked]["tflops"]
        for (w, d, who, asked), r in by.items()
        if who == "xsake block 64"
    ]
    errors = record.load("gpu_accuracy")["results"]
    ours, peer = ([r["rms"] for r in errors if r["implementation"] == w] for w in ("xsake", "cudnn"))
    return [
        f'- At 4096 tokens and "43%", latency below cuDNN\'s dense attention by: {saved}.',
        f"- Memory of forward+backward there: {memory['xsake'] / memory['xla dense']:.0%} of unfused attention in XLA.",
        f"- Heads from 10% to 90%: {min(uneven):.2f} to {max(uneven):.2f} of the throughput of a uniform mask.",
        f"- Mask blocks of 64: {min(small):.2f} to {max(small):.2f} of the throughput with blocks of 128.",
        f"- Error against float64, output and gradients, over cuDNN's: at most "
        f"{max(a / b for a, b in zip(ours, peer, strict=True)):.2f}.",
    ]


def gpu_profile() -> str:
    """What the forward is busy with, by the hardware's counters."""
    run = record.load("gpu_profile")
    rows = ["| forward, density | tensor cores | DRAM | L2 | L2 hits |", "| --- | --- | --- | --- | --- |"]
    for r in run["results"]:
        shares = [r[name] for name in ("tensor_core_share", "dram_share", "l2_share", "l2_hit_rate")]
        rows.append(f"| {r['workload']}, {r['asked']:.0%} | {' | '.join(f'{share:.0f}%' for share in shares)} |")
    e = run["environment"]
    source = f"From `benchmarks/results/gpu_profile.json`: {e['device']}, cold caches, commit {e['commit']}."
    return "\n".join([*rows, "", source])


def tpu_schedule() -> str:
    """Cycles of the compiler's schedules; splash at the mask's block, or at 512 where the mask's block is smaller."""
    run = record.load("tpu_schedule")
    schedules = [r for r in run["results"]["schedules"] if r["head_dim"] == 128]
    rows = ["| kernel, mask block | v5e | v6e |", "| --- | --- | --- |"]
    for kernel, block in dict.fromkeys((r["kernel"], r["block"]) for r in schedules if r["whose"] == "ours"):
        cells = []
        for chip in ("v5e:2x2", "v6e:2x2"):
            of = {
                (r["whose"], r["block"]): r["loops"][0]
                for r in schedules
                if (r["kernel"], r["topology"]) == (kernel, chip)
            }
            ours, splash = of["ours", block], of.get(("splash", max(block, 512)))
            peer = f", splash {splash['inner']:.0f}" if splash else ""
            cells.append(f"{ours['inner']:.0f} ({ours['loop']:.0f} with its copies{peer})")
        rows.append(f"| {kernel}, {block} | {' | '.join(cells)} |")
    worst = {k: max(t[k] for t in run["results"]["totals"]) for k in ("over_uniform_strict", "over_splash_strict")}
    facts = (
        f"Heads from 10% to 90%, estimated whole: at most {worst['over_uniform_strict']:.2f} of a uniform mask's "
        f"cycles and {worst['over_splash_strict']:.2f} of splash's with the same masks at block 512."
    )
    e = run["environment"]
    source = (
        f"From `benchmarks/results/tpu_schedule.json`: libtpu {e['versions']['libtpu']}, jax {e['versions']['jax']}."
    )
    return "\n".join([*rows, "", facts, source])


def tpu_gather_shapes() -> str:
    """Our walk against the other shape with the chunk that suits it best, at blocks of 128."""
    run = record.load("tpu_gather_shapes")
    e, long = run["environment"], run["results"]["longest"][0]
    rows = [r for r in run["results"]["shapes"] if r["block"] == 128]
    tiles, calls = [], []
    for chip in dict.fromkeys(r["topology"] for r in rows):
        walk = next(r for r in rows if (r["topology"], r["shape"]) == (chip, "walk"))
        other = [r for r in rows if (r["topology"], r["shape"]) == (chip, "specs")]
        tiles.append(f"{walk['loop']:.0f} against {min(r['loop'] for r in other):.0f} on {chip.split(':')[0]}")
        calls.append([mine / min(r["whole"][n] for r in other) for n, mine in enumerate(walk["whole"])])
    whole = ", ".join(f"{' and '.join(f'{c[n]:.2f}' for c in calls)} at {t}" for n, t in enumerate(e["lengths"]))
    return (
        f"Blocks of 128 are gathered by transfers of the kernel's own. An operand a block, which Pallas looks up and "
        f"brings, costs more:\nforward, with copies, {', '.join(tiles)}; whole calls, heads from 10% to 90%, ours over "
        f"its best: {whole} tokens.\nIts lists must lie in SMEM: those of {long['length']} tokens and {long['heads']} "
        f"heads ({long['list_bytes'] / 2**20:.0f} MiB) {'fit' if long['problem'] is None else 'do not fit'}.\n"
        f"From `benchmarks/results/tpu_gather_shapes.json`: libtpu {e['versions']['libtpu']}, commit {e['commit']}."
    )


def tpu_compile() -> str:
    run = record.load("tpu_compile")
    workloads, chips = run["results"]["workloads"], run["results"]["topologies"]
    blocks, tokens = [n for w in workloads for n in w["blocks"]], [w["tokens"] for w in workloads]
    done = ", ".join(f"{t['topology'].split(':')[0]} {t['compiled']}" for t in chips)
    e = run["environment"]
    return (
        f"Kernels that the TPU compiler makes of {len(workloads)} workloads with default configurations, forward, dQ "
        f"and dK/dV (mask blocks\nfrom {min(blocks)} to {max(blocks)}, up to {max(tokens)} tokens): {done}; "
        f"{sum(len(t['failed']) for t in chips)} failed.\nFrom `benchmarks/results/tpu_compile.json`: "
        f"libtpu {e['versions']['libtpu']}, jax {e['versions']['jax']}, commit {e['commit']}."
    )


def train_gpu() -> str:
    """Runs of so many tokens, and the time of a step at the longer length beside dense attention's."""
    if not (record.RESULTS / "train_gpu.json").exists():
        return "Not recorded yet."
    run = record.load("train_gpu")
    rows = [
        "| model, tokens of a sequence | attention | active blocks | a step | tokens/s | MFU | held-out loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    dense = {(r["preset"], r["length"]): r for r in run["results"] if r["kind"] == "dense"}
    for r in sorted(run["results"], key=lambda r: (r["length"], r["preset"] != "small", r["kind"])):
        ratio = dense[r["preset"], r["length"]]["seconds"]["median"] / r["seconds"]["median"]
        faster = "" if r["kind"] == "dense" else f", {ratio:.2f}x as fast"
        alone = "beside" not in r
        loss = f"{r['held_out_loss']:.3f} after {r['tokens'] / 1e6:.0f}M tokens" if "held_out_loss" in r else ""
        cells = [
            f"{r['preset']}, {r['length']}",
            "dense (cuDNN)" if r["kind"] == "dense" else r["config"]["attention"],
            f"{r['density']:.0%}",
            f"{_ms(r['seconds'])}{faster}" if alone else "not timed alone",
            f"{r['tokens_per_second']:,.0f}" if alone else "",
            f"{r['mfu']:.0%}" if alone else "",
            loss,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    notes = [
        f"{r['config']['attention']} (commit {r['environment']['commit'][:7]}) ran beside {r['beside']}."
        for r in run["results"]
        if "beside" in r
    ]
    return "\n".join([*rows, "", *notes, _source(run, "train_gpu")])


def smollm2() -> str:
    run = record.load("smollm2")
    r, e = run["results"], run["environment"]
    worst = max(window["sparse_difference"] for window in r["windows"])
    return (
        f"Loaded so, SmolLM2 reads Python's own documentation with a perplexity of {r['perplexity']:.1f} "
        f"({len(r['windows'])} windows of {r['length']} tokens);\n"
        f"attention by a mask of every block changes no logit by more than {worst:.0e}. "
        f"From `benchmarks/results/smollm2.json`:\n"
        f"{r['dtype']} on {e['device']}, jax {e['versions']['jax']}, commit {e['commit']}."
    )


def tuning() -> str:
    """What is shipped for each device kind, and what it gains over the heuristic."""
    rows = [
        "| file | entries | of the present kernels | from | 5% faster than the heuristic or more | heuristic within 3%"
        " | the most | versions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted((record.ROOT / "tuning_db").glob("*.json")):
        if path.name == "schema.json":
            continue
        shipped = json.loads(path.read_text())
        entries = shipped["entries"]
        gains = [entry["speedup"] for entry in entries]
        versions = [e["versions"] for e in shipped["environments"].values()]
        cells = [
            f"`{path.name}`",
            str(len(entries)),
            str(sum(entry["kernel"] == kernel_hash(entry["key"]["implementation"]) for entry in entries)),
            " and ".join(sorted({SOURCES[entry["source"]] for entry in entries})),
            str(sum(gain >= FASTER for gain in gains)),
            str(sum(gain <= SAME for gain in gains)),
            f"{max(gains):.2f}x",
            "; ".join(", ".join(f"{k} {v[k]}" for k in ("jax", "libtpu") if k in v) for v in versions),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _source(run: dict, name: str) -> str:
    e = run["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in e["versions"].items() if k in ("jax", "torch"))
    return (
        f"Medians with quartiles, from `benchmarks/results/{name}.json`: {e['device']}, {e['cores']} cores, "
        f"{versions}, commit {e['commit'][:7]}."
    )


def _ms(t: dict) -> str:
    return f"{t['median'] * 1e3:.0f} ms ({t['low'] * 1e3:.0f}-{t['high'] * 1e3:.0f})"


PARTS: dict[str, Callable[[], str]] = {
    "cpu_attention": cpu_attention,
    "gpu_attention": gpu_attention,
    "gpu_profile": gpu_profile,
    "hads_study": hads_study,
    "smollm2": smollm2,
    "tpu_compile": tpu_compile,
    "tpu_gather_shapes": tpu_gather_shapes,
    "tpu_schedule": tpu_schedule,
    "train_gpu": train_gpu,
    "tuning": tuning,
}


def rendered(text: str) -> str:
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"README.md has no part '<!-- generated: {name} -->'"
        body = make()
        text = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)
    return text


def main() -> None:
    text = README.read_text()
    if "--check" in sys.argv:
        sys.exit(
            rendered(text) != text and "README.md does not match the recorded runs: run python -m benchmarks.report"
        )
    README.write_text(rendered(text))


if __name__ == "__main__":
    main()
