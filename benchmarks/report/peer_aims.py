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
OTHER_MASKS = 1.05  # the same with lines, and with sink and window
ODD = {FORWARD: 1.00, BOTH: 0.95}  # the same at head_dim 96
LINES_OF_RANDOM = 0.90  # throughput over ours on a random mask with as many blocks
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
    masks = [m for w, d, m, who in by if (w, d, who) == ("llama32k", BOTH, "xsake") and not m.startswith("random")]
    rows = [_against_fa4(by, "llama32k", BOTH, mask, OTHER_MASKS) for mask in masks]
    rows += [_against_fa4(by, "odd10k_d96", direction, "random 25%", aim) for direction, aim in ODD.items()]
    for mask in masks:
        kind, _, density = mask.partition(" ")
        if kind == "lines" and ("llama32k", BOTH, f"random {density}", "xsake") in by:
            ours = [by["llama32k", BOTH, f"{kind} {density}", "xsake"] for kind in ("lines", "random")]
            rows.append(_row("llama32k", BOTH, "the random mask", mask, LINES_OF_RANDOM, ours[0] / ours[1], None))
    return rows


def _small_blocks(by: Runs) -> list[list[str]]:
    return [
        _row(w, d, "blocks of 128", f"{mask}, blocks of 64", BLOCKS_OF_64, small / by[w, d, mask, "xsake"], None)
        for (w, d, mask, who), small in by.items()
        if who == "xsake, blocks of 64"
    ]


def _against_fa4(by: Runs, workload: str, direction: str, mask: str, aim: float) -> list[str]:
    """Over its dense form where it has no number with a mask."""
    name = "fa4" if (workload, direction, mask, "fa4") in by else "fa4 dense"
    peer = by[workload, direction, mask, name]
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
