"""What the Hopper kernels aim at beside FlashAttention-4, and how far they are: from the runs of `gpu_peers`."""

from __future__ import annotations

from benchmarks import record
from benchmarks.report.words import table

FORWARD, BOTH = "forward", "forward+backward"
DENSITIES = ("100%", "43%", "10%")
# Throughput over FlashAttention-4's on the same random mask, by density.
RANDOM = {
    (("llama32k", "full16k"), FORWARD): (1.00, 1.00, 1.05),
    (("llama32k", "full16k"), BOTH): (1.00, 1.00, 1.05),
    (("gpt4k", "gpt4k_d64"), FORWARD): (1.05, 1.10, 1.25),
    (("gpt4k", "gpt4k_d64"), BOTH): (1.00, 1.05, 1.15),
}
OTHERS = ("llama32k", "smollm8k")  # where other masks are raced:
OTHER_MASKS = 1.05  # the same with lines, with sink and window, and with HADS's own masks
ODD = {FORWARD: 1.00, BOTH: 0.95}  # the same at head_dim 96
OTHERS_OF_RANDOM = 0.90  # throughput over ours on a random mask with as many blocks
BLOCKS_OF_64 = 0.88  # throughput over ours with blocks of 128

Runs = dict[tuple[str, str, str, str], float]


def gpu_aims() -> str:
    by = {
        (r["workload"], r["direction"], r["mask"], r["implementation"]): r["tflops"]
        for run in record.load_all("gpu_peers_").values()
        for r in run["results"]
    }
    rows = [*_random(by), *_others(by), *_small_blocks(by)]
    return "\n".join(table(["call, direction", "throughput over", "mask", "aim", "default", "any order"], rows))


def _random(by: Runs) -> list[list[str]]:
    return [
        _against_fa4(by, workload, direction, f"random {density}", aim)
        for (workloads, direction), aims in RANDOM.items()
        for workload in workloads
        for density, aim in zip(DENSITIES, aims, strict=True)
    ]


def _others(by: Runs) -> list[list[str]]:
    ours = [(workload, mask) for workload, direction, mask, who in by if (direction, who) == (BOTH, "xsake")]
    raced = [(workload, mask) for workload, mask in ours if workload in OTHERS and not mask.startswith("random")]
    rows = [_against_fa4(by, workload, BOTH, mask, OTHER_MASKS) for workload, mask in raced]
    rows += [_against_fa4(by, "odd10k_d96", direction, "random 25%", aim) for direction, aim in ODD.items()]
    for workload, mask in raced:
        kind, _, density = mask.partition(" ")
        random = f"random, as {mask}" if kind == "HADS" else f"random {density}"
        if kind in ("lines", "HADS") and (workload, BOTH, random, "xsake") in by:
            ratio = by[workload, BOTH, mask, "xsake"] / by[workload, BOTH, random, "xsake"]
            rows.append(_row(workload, BOTH, "the random mask", mask, OTHERS_OF_RANDOM, ratio, None))
    return rows


def _small_blocks(by: Runs) -> list[list[str]]:
    return [
        _row(w, d, "blocks of 128", f"{mask}, blocks of 64", BLOCKS_OF_64, small / by[w, d, mask, "xsake"], None)
        for (w, d, mask, who), small in by.items()
        # Blocks of 128 that hold HADS's blocks of 64 are another mask, with more elements.
        if who == "xsake, blocks of 64" and not mask.startswith("HADS")
    ]


def _against_fa4(by: Runs, workload: str, direction: str, mask: str, aim: float) -> list[str]:
    """Over its dense form where it has no number with a mask."""
    name = "fa4" if (workload, direction, mask, "fa4") in by else "fa4 dense"
    peer = by.get((workload, direction, mask, name))
    if peer is None:
        return [f"{workload}, {direction}", "FlashAttention-4", mask, f"{aim:.2f}", "no number of it", ""]
    free = by.get((workload, direction, mask, "xsake, any order"))
    own = by[workload, direction, mask, "xsake"] / peer
    over = "FlashAttention-4" if name == "fa4" else "FlashAttention-4 dense"
    return _row(workload, direction, over, mask, aim, own, None if free is None else free / peer)


def _row(workload: str, direction: str, over: str, mask: str, aim: float, own: float, free: float | None) -> list[str]:
    return [
        f"{workload}, {direction}",
        over,
        mask,
        f"{aim:.2f}",
        _value(own, aim),
        "" if free is None else _value(free, aim),
    ]


def _value(found: float, aim: float) -> str:
    return f"{found:.2f}" if round(found, 2) >= aim else f"{found:.2f}, missed"
