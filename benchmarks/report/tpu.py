"""What is known of the TPU kernels without a TPU: whether they compile, and the cycles of their schedules."""

from __future__ import annotations

from benchmarks.report.words import Run, grid, section, unique

CHIPS = {"v5e:2x2": "v5e", "v6e:2x2": "v6e"}


def tpu_schedule() -> str:
    """Cycles of the compiler's schedules; splash at the mask's block, or at 512 where the mask's block is smaller."""
    run = Run.load("tpu_schedule")
    by = {
        (r["kernel"], r["topology"], r["whose"], r["block"]): r["loops"][0]
        for r in run.results["schedules"]
        if r["head_dim"] == 128
    }
    rows = unique((kernel, block) for kernel, _, whose, block in by if whose == "ours")
    columns = {
        (chip, what): f"{name}: {words}"
        for chip, name in CHIPS.items()
        for what, words in (("inner", "tile"), ("loop", "tile and its copies"), ("splash", "splash, tile"))
    }

    def cell(at: tuple[str, int], column: tuple[str, str]) -> str:
        (kernel, block), (chip, what) = at, column
        if what == "splash":
            peer = by.get((kernel, chip, "splash", max(block, 512)))
            return f"{peer['inner']:.0f}" if peer else ""
        return f"{by[kernel, chip, 'ours', block][what]:.0f}"

    worst = {k: max(t[k] for t in run.results["totals"]) for k in ("over_uniform_strict", "over_splash_strict")}
    return section(
        grid(("kernel", "mask block"), {at: (at[0], str(at[1])) for at in rows}, columns, cell),
        "Whole calls in which the heads' densities run from 10% to 90%, estimated from these cycles: at most "
        f"{worst['over_uniform_strict']:.2f} of the cycles of a uniform mask, and at most "
        f"{worst['over_splash_strict']:.2f} of the cycles of splash attention with the same masks at block 512.",
        _source(run),
    )


def tpu_gather_shapes() -> str:
    """`walk` against `specs` with the chunk that suits it best, at blocks of 128; its script is in its commit."""
    run = Run.load("tpu_gather_shapes")
    long, lengths = run.results["longest"][0], run.content["environment"]["lengths"]
    rows = [r for r in run.results["shapes"] if r["block"] == 128]
    own = {r["topology"]: r for r in rows if r["shape"] == "walk"}
    columns = {"own": "own transfers, cycles per tile", "other": "operands, cycles per tile"}
    columns |= {n: f"whole calls at {length} tokens, ours over operands" for n, length in enumerate(lengths)}

    def cell(chip: str, column: str | int) -> str:
        other = [r for r in rows if (r["topology"], r["shape"]) == (chip, "specs")]
        if isinstance(column, int):
            return f"{own[chip]['whole'][column] / min(r['whole'][column] for r in other):.2f}"
        return f"{own[chip]['loop'] if column == 'own' else min(r['loop'] for r in other):.0f}"

    fits = "fit" if long["problem"] is None else "do not fit"
    return section(
        grid("chip", {chip: chip.split(":")[0] for chip in own}, columns, cell),
        f"The lists of operands must lie in SMEM: the lists of {long['length']} tokens and {long['heads']} heads "
        f"({long['list_bytes'] / 2**20:.0f} MiB) {fits}.",
        _source(run),
    )


def tpu_compile() -> str:
    run = Run.load("tpu_compile")
    workloads, chips = run.results["workloads"], {t["topology"]: t for t in run.results["topologies"]}
    blocks, tokens = [n for w in workloads for n in w["blocks"]], [w["tokens"] for w in workloads]
    paged = sum(w.get("paged", False) for w in workloads)
    alone = f" (of the {paged} with keys in pages the forward alone)" if paged else ""
    columns = {"compiled": "kernels compiled", "failed": "failed"}

    def cell(chip: str, what: str) -> str:
        found = chips[chip][what]
        return str(found if what == "compiled" else len(found))

    return section(
        f"The TPU compiler was given {len(workloads)} workloads (mask blocks from {min(blocks)} to {max(blocks)}, up "
        f"to {max(tokens)} tokens), each with its default configuration: forward, dQ and dK/dV{alone}.",
        grid("chip", {chip: chip.split(":")[0] for chip in chips}, columns, cell),
        _source(run),
    )


def _source(run: Run) -> str:
    """The compiler, and not the machine that it ran on."""
    versions = run.content["environment"]["versions"]
    return f"Recorded in `benchmarks/results/{run.name}.json`: libtpu {versions['libtpu']}, jax {versions['jax']}."
