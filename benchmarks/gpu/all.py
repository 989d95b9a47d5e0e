"""All benchmarks of this GPU, one command: compiled side by side, raced one after the other, alone on the chip.

    python -m benchmarks.gpu.all --record                       all of them, into benchmarks/results
    python -m benchmarks.gpu.all --out DIR --minutes 20         as far as twenty minutes go, into DIR
    python -m benchmarks.gpu.all --out DIR --only peers,decode
    python -m benchmarks.gpu.all --out DIR --give selection="--peers ejkernel" --give peers="--rounds 3"

Benchmarks that compile everything before they race begin together, large ones in several parts: a process compiles one
program at a time. When all of them have compiled, they race in turn; then the others run, one after the other. What
each prints is in DIR/logs. Parts write to DIR/parts as they go (with --record, both are in out/), and their records are
joined when a part has ended, so that a run that is cut off keeps what it has measured. A benchmark that fails does not
stop the others.
"""

from __future__ import annotations

import sys
import time

from benchmarks import record
from benchmarks.harness.jobs import jobs_of, options_of, run
from benchmarks.harness.script import listed, parser, show

# Those that call `turns.begin`, and the options of their parts.
TOGETHER = {
    "peers": (
        *(f"--only llama32k --masks {masks}" for masks in ("random", "sink", "lines")),
        *(f"--only {workload}" for workload in ("full16k", "odd10k_d96", "mla16k", "smollm8k")),
        # One mask each: a peer that fails takes its process with it.
        *(f"--only {name} --masks 'random {d}%'" for name in ("gpt4k", "gpt4k_d64") for d in (43, 10, 100)),
    ),
    "blocks": ("--only llama32k", "--only full16k"),
    "selection": ("--tokens 65536", "--tokens 32768", "--tokens 8192"),
    "prompt": ("--models qwen2.5-1.5b", "--models smollm2-135m"),
    "attention": tuple(f"--only {workload}" for workload in ("gpt4k", "gpt4k_d64", "llama32k", "full16k")),
    "generate": ("--batches 1", "--batches 8", "--batches 32"),
}
ALONE = ("decode", "packing", "short_gradients", "hops", "mask_cost", "first_call", "accuracy", "sanitize")


def main() -> None:
    options = parser(__doc__)
    known = (*TOGETHER, *ALONE)
    options.add_argument("--only", type=listed(among=known), default=[*known], help="some of them")
    options.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options.add_argument(
        "--give",
        type=options_of(known),
        action="append",
        default=[],
        metavar="NAME=OPTIONS",
        help="more options of a benchmark",
    )
    args = options.parse_args()
    if args.out is None:
        options.error("say where the records go: --record or --out DIR")
    out, more = args.out.resolve(), dict(args.give)
    logs = (record.ROOT / "out" if args.out == record.RESULTS else out) / "logs"
    together, alone = (
        [
            job
            for name, parts in parts_of.items()
            if name in args.only
            for job in jobs_of(name, parts, more.get(name, ""), out, logs)
        ]
        for parts_of in (TOGETHER, dict.fromkeys(ALONE, ()))
    )
    deadline, jobs = time.monotonic() + 60 * args.minutes, [*together, *alone]
    run(together, alone, deadline=deadline, out=out)
    numbers = [["" if x is None else f"{x:.0f}" for x in (job.compiled, job.seconds)] for job in jobs]
    lines = [[job.name, *times, job.status] for job, times in zip(jobs, numbers, strict=True)]
    show(["benchmark", "compiled after, s", "turn, s", "what became of it"], lines)
    sys.exit(any(job.status != "done" for job in jobs))


if __name__ == "__main__":
    main()
