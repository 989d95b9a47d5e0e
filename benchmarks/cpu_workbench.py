"""Seconds of XSAKE's commands for kernel authors on a CPU, from a command to its table, with the start of Python.

    python -m benchmarks.cpu_workbench              run each command several times, in turn, and print
    python -m benchmarks.cpu_workbench --record     also write benchmarks/results/cpu_workbench.json

A row per run, with the machine's load before it: on a machine that others use, the least seconds count.
"""

from __future__ import annotations

import os
import statistics

from benchmarks.gpu.workbench import command
from benchmarks.harness.script import Record, parser, show

SHAPE = "1x4096x8x64,causal,density=0.4"
COMMANDS = {
    "check": ("check", "xla", "--quick"),
    "race": ("race", "--shape", SHAPE, "--against", "dense,xla"),
}


def main() -> None:
    args = parser(__doc__, rounds=5).parse_args()
    rows = Record("cpu_workbench", args.out, cores=os.cpu_count())
    for _ in range(args.rounds):
        for step, words in COMMANDS.items():
            load = os.getloadavg()[0]
            rows.add(command(step, *words) | {"load": load})
    seconds = {step: [row["seconds"] for row in rows if row["step"] == step] for step in COMMANDS}
    table = [
        ["xsake " + " ".join(words), *(f"{of(seconds[step]):.1f}" for of in (statistics.median, min, max))]
        for step, words in COMMANDS.items()
    ]
    show(["command", "median s", "least", "most"], table)


if __name__ == "__main__":
    main()
