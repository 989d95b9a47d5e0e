"""What was aimed at, and how far it was reached: one table for all recorded runs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report import attention, generation, ruler, selection
from benchmarks.report.study import study
from benchmarks.report.words import Run, median, table
from xsake._ground.words import call, model
from xsake._race.course import BOTH, DIRECTIONS, FORWARD

DENSITIES = ("100%", "43%", "10%")
# Throughput over FlashAttention-4's on the same random mask, by density.
RANDOM = {
    ("llama32k", FORWARD): (1.00, 1.00, 1.05),
    ("full16k", FORWARD): (1.00, 1.00, 1.05),
    ("llama32k", BOTH): (1.00, 1.00, 1.05),
    ("full16k", BOTH): (1.00, 1.00, 1.05),
    ("gpt4k", FORWARD): (1.05, 1.10, 1.25),
    ("gpt4k_d64", FORWARD): (1.05, 1.10, 1.25),
    ("gpt4k", BOTH): (1.00, 1.05, 1.15),
    ("gpt4k_d64", BOTH): (1.00, 1.05, 1.15),
}
OTHERS = ("llama32k", "smollm8k")  # where other masks are raced:
OTHER_MASKS = 1.05  # the same with lines, with sink and window, and with HADS's own masks
ODD = {FORWARD: 1.00, BOTH: 0.95}  # the same at head_dim 96
OTHERS_OF_RANDOM = 0.90  # throughput over ours on a random mask with as many blocks
BLOCKS_OF_64 = 0.88  # throughput over ours with blocks of 128
PACKED = 0.9  # throughput of blocks of 16 queries over that of 64
# Seconds under jit with a new shape when the aim was set, which is half of the longer ones.
FIRST_CALLS = {"jit, first forward": 3.7, "jit, first gradient": 7.6}
PROMPT, PROMPT_MFU, CHUNKS = {"HADS 20%": 1.5, "HADS 10%": 1.65}, 0.45, 1.1
BANDWIDTH = 0.8  # of a copy, dense decoding
CHOSEN, WHOLE = {FORWARD: 300, BOTH: 250}, {FORWARD: 0.016, BOTH: 0.060}  # TFLOP/s; seconds
PERPLEXITY = {0.2: 0.005, 0.1: 0.02}  # HADS's over dense, Qwen2.5-Coder-1.5B
POINTS = {0.2: 2.0, 0.1: 5.0}  # that HADS may lose of RULER
READ_IN_CHUNKS = 1.05  # KL over that of one piece

Aim = tuple[str, float, float, bool]  # what, the aim, what was found, whether more is better
Tflops = dict[tuple[str, str, str, str], float]


def aims() -> str:
    rows = [[what, f"{aim:.3g}", f"{found:.3g}", said(found, aim, more)] for what, aim, found, more in _all()]
    return table(["aim", "at least or at most", "found", ""], rows)


def said(found: float, aim: float, more_is_better: bool) -> str:
    reached = round(found, 2) >= aim if more_is_better else found <= aim
    return "reached" if reached else "missed"


def _all() -> Iterator[Aim]:
    yield from kernels({at: r["tflops"] for at, r in attention.peers().items()})
    yield from _packing()
    yield from _models()
    yield from _tokens()
    yield from _quality()


def kernels(by: Tflops) -> Iterator[Aim]:
    """The Hopper kernels: beside FlashAttention-4, or its dense form where it has no number with a mask."""
    for (workload, direction), wanted in RANDOM.items():
        for density, aim in zip(DENSITIES, wanted, strict=True):
            yield from _over_fa4(by, workload, direction, f"random {density}", aim)
    own = [(w, mask) for w, direction, mask, who in by if (direction, who) == (BOTH, "xsake")]
    raced = [(w, mask) for w, mask in own if w in OTHERS and not mask.startswith("random")]
    for workload, mask in raced:
        yield from _over_fa4(by, workload, BOTH, mask, OTHER_MASKS)
        kind, _, density = mask.partition(" ")
        random = f"random, as {mask}" if kind == "HADS" else f"random {density}"
        if kind in ("lines", "HADS") and (workload, BOTH, random, "xsake") in by:
            ratio = by[workload, BOTH, mask, "xsake"] / by[workload, BOTH, random, "xsake"]
            yield (
                f"{call(workload)}, {BOTH}, {mask}: throughput over that of a random mask",
                OTHERS_OF_RANDOM,
                ratio,
                True,
            )
    for direction, aim in ODD.items():
        yield from _over_fa4(by, "odd10k_d96", direction, "random 25%", aim)
    for (workload, direction, mask, who), small in by.items():
        # Blocks of 128 that hold HADS's blocks of 64 are another mask, with more elements.
        if who == "xsake, blocks of 64" and not mask.startswith("HADS"):
            what = f"{call(workload)}, {direction}, {mask}: blocks of 64 over blocks of 128"
            yield what, BLOCKS_OF_64, small / by[workload, direction, mask, "xsake"], True


def _over_fa4(by: Tflops, workload: str, direction: str, mask: str, aim: float) -> Iterator[Aim]:
    at = (workload, direction, mask)
    name = "fa4" if (*at, "fa4") in by else "fa4 dense"
    if (*at, name) not in by:
        return
    peer = "FlashAttention-4" + (" (dense)" if name == "fa4 dense" else "")
    for who, how in (("xsake", ""), ("xsake, any order", ", `deterministic=False`")):
        if (*at, who) in by:
            yield f"{call(workload)}, {direction}, {mask}{how}: over {peer}", aim, by[*at, who] / by[*at, name], True


def _packing() -> Iterator[Aim]:
    by = Run.load("gpu_packing").by("block_q", "asked")
    few, many = min(by)[0], max(by)[0]
    for n, asked in by:
        for direction in DIRECTIONS if n == few else ():
            ratio = by[few, asked]["tflops"][direction] / by[many, asked]["tflops"][direction]
            yield (
                f"blocks of {few} queries at {asked:.0%}, {direction}: throughput over blocks of {many}",
                PACKED,
                ratio,
                True,
            )


def _models() -> Iterator[Aim]:
    calls = Run.load("gpu_first_call").by("call", "implementation")
    for name, before in FIRST_CALLS.items():
        yield f"{name}, seconds", before / 2, max(calls[name, "xsake"]["seconds"]), False
    for r in Run.load("gpu_prompt").results:
        if r["length"] != 32768:
            continue
        name = f"{generation.named(r)}, {r['length']} tokens"
        for way, aim in PROMPT.items():
            yield f"{name}: first token with {way}, over cuDNN", aim, generation.over_dense(r, way), True
        yield f"{name}: MFU of the prefill by cuDNN", PROMPT_MFU, r["mfu"][generation.DENSE], True
        for way, cost in generation.chunks_over_one_piece(r).items():
            if way.startswith("HADS"):
                yield f"{name}: chunks over one piece, {way.partition(',')[0]}", CHUNKS, cost, False
    for r in Run.load("gpu_decode").results:
        what = f"{model(r['heads'])}, batch {r['batch']}: dense decoding, share of the copy bandwidth"
        yield what, BANDWIDTH, generation.bandwidth_share(r, "dense"), True


def _tokens() -> Iterator[Aim]:
    longest = next(r for r in Run.load("gpu_selection").results if r["choice"] == "scored")
    for direction, aim in CHOSEN.items():
        what = f"tokens that choose, {longest['tokens']} tokens, {direction}: TFLOP/s on chosen blocks"
        yield what, aim, selection.tflops(longest, direction), True
    for direction, aim in WHOLE.items():
        what = f"tokens that choose, {longest['tokens']} tokens, whole operation, {direction}: ms"
        yield what, 1e3 * aim, 1e3 * median(longest, f"whole, {direction}"), False


def _quality() -> Iterator[Aim]:
    qwen = study("qwen2.5-coder-1.5b", 32768)
    for budget, aim in PERPLEXITY.items():
        yield (
            f"Qwen2.5-Coder-1.5B with HADS {budget:.0%}: % of perplexity over dense",
            100 * aim,
            100 * qwen.by["hads", budget]["perplexity_gap"],
            False,
        )
    for budget, points in POINTS.items():
        what = f"RULER at 32768 tokens with HADS {budget:.0%}: points below dense"
        yield (
            f"{what} (the oracle: {ruler.points_lost(budget, 'oracle_gain'):.1f})",
            points,
            ruler.points_lost(budget),
            False,
        )
    for run in Run.load_all("hads/chunks-"):
        in_chunks = [r for r in run.results["reading"] if r["chunk"] is not None]
        worst = max(r["of_one_piece"] for r in in_chunks)
        yield (
            f"{model(run.settings['model'])}: KL of reading in chunks over that of one piece",
            READ_IN_CHUNKS,
            worst,
            False,
        )
