"""What is known of the TPU kernels without a TPU: whether they compile, and the cycles of their schedules."""

from __future__ import annotations

from benchmarks import record
from benchmarks.report.words import table

CHIPS = ("v5e:2x2", "v6e:2x2")


def tpu_schedule() -> str:
    """Cycles of the compiler's schedules; splash at the mask's block, or at 512 where the mask's block is smaller."""
    run = record.load("tpu_schedule")
    schedules = [r for r in run["results"]["schedules"] if r["head_dim"] == 128]
    rows = []
    for kernel, block in dict.fromkeys((r["kernel"], r["block"]) for r in schedules if r["whose"] == "ours"):
        row = [kernel, str(block)]
        for chip in CHIPS:
            of = {
                (r["whose"], r["block"]): r["loops"][0]
                for r in schedules
                if (r["kernel"], r["topology"]) == (kernel, chip)
            }
            ours, splash = of["ours", block], of.get(("splash", max(block, 512)))
            row += [f"{ours['inner']:.0f}", f"{ours['loop']:.0f}", f"{splash['inner']:.0f}" if splash else ""]
        rows.append(row)
    columns = ("tile", "tile and its copies", "splash, tile")
    heads = ["kernel", "mask block", *(f"{chip.split(':')[0]}: {column}" for chip in CHIPS for column in columns)]
    worst = {k: max(t[k] for t in run["results"]["totals"]) for k in ("over_uniform_strict", "over_splash_strict")}
    e = run["environment"]
    return "\n".join(
        [
            *table(heads, rows),
            "",
            f"Whole calls in which the heads' densities run from 10% to 90%, estimated from these cycles: at most "
            f"{worst['over_uniform_strict']:.2f} of the cycles of a uniform mask, and at most "
            f"{worst['over_splash_strict']:.2f} of the cycles of splash attention with the same masks at block 512.",
            "",
            f"Recorded in `benchmarks/results/tpu_schedule.json`: libtpu {e['versions']['libtpu']}, "
            f"jax {e['versions']['jax']}.",
        ]
    )


def tpu_gather_shapes() -> str:
    """`walk` against `specs` with the chunk that suits it best, at blocks of 128 (benchmarks/tpu/gather_shapes.py)."""
    run = record.load("tpu_gather_shapes")
    e, long = run["environment"], run["results"]["longest"][0]
    rows = [r for r in run["results"]["shapes"] if r["block"] == 128]
    lines = []
    for chip in dict.fromkeys(r["topology"] for r in rows):
        walk = next(r for r in rows if (r["topology"], r["shape"]) == (chip, "walk"))
        other = [r for r in rows if (r["topology"], r["shape"]) == (chip, "specs")]
        whole = (mine / min(r["whole"][n] for r in other) for n, mine in enumerate(walk["whole"]))
        cells = [chip.split(":")[0], f"{walk['loop']:.0f}", f"{min(r['loop'] for r in other):.0f}"]
        lines.append([*cells, *(f"{ratio:.2f}" for ratio in whole)])
    lengths = (f"whole calls at {length} tokens, ours over operands" for length in e["lengths"])
    fits = "fit" if long["problem"] is None else "do not fit"
    return "\n".join(
        [
            *table(["chip", "own transfers, cycles per tile", "operands, cycles per tile", *lengths], lines),
            "",
            f"The lists of operands must lie in SMEM: the lists of {long['length']} tokens and {long['heads']} heads "
            f"({long['list_bytes'] / 2**20:.0f} MiB) {fits}.",
            "",
            f"Recorded in `benchmarks/results/tpu_gather_shapes.json`: libtpu {e['versions']['libtpu']}, "
            f"commit {e['commit']}.",
        ]
    )


def tpu_compile() -> str:
    run = record.load("tpu_compile")
    workloads, chips = run["results"]["workloads"], run["results"]["topologies"]
    blocks, tokens = [n for w in workloads for n in w["blocks"]], [w["tokens"] for w in workloads]
    paged = sum(w.get("paged", False) for w in workloads)
    alone = f" (of the {paged} with keys in pages the forward alone)" if paged else ""
    e = run["environment"]
    rows = [[t["topology"].split(":")[0], str(t["compiled"]), str(len(t["failed"]))] for t in chips]
    return "\n".join(
        [
            f"The TPU compiler was given {len(workloads)} workloads (mask blocks from {min(blocks)} to {max(blocks)}, "
            f"up to {max(tokens)} tokens), each with its default configuration: forward, dQ and dK/dV{alone}.",
            "",
            *table(["chip", "kernels compiled", "failed"], rows),
            "",
            f"Recorded in `benchmarks/results/tpu_compile.json`: libtpu {e['versions']['libtpu']}, "
            f"jax {e['versions']['jax']}, commit {e['commit']}.",
        ]
    )
