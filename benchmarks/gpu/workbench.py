"""XSAKE's commands on a backend of another package: JAX's own attention for Hopper, by examples/jax_mosaic.

    pip install -e examples/jax_mosaic
    python -m benchmarks.gpu.workbench                   check, tune, refresh, race and gate, print
    python -m benchmarks.gpu.workbench --record          also write benchmarks/results/gpu_workbench.json
    python -m benchmarks.gpu.workbench --out DIR --only check,race
    python -m benchmarks.gpu.workbench --backend xla --shapes 1x256x2x16,causal --rounds 2    a small run, anywhere

A row per command: what it was, its seconds from beginning to end, its exit code, what it printed, and the numbers of a
race. JAX's kernel computes in float16, and takes the query times the scale: races with heads of 128 numbers let it
round that (JAX_MOSAIC_ROUNDS=1), which the check does not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness.script import Record, Row, listed, parser, show
from xsake import tuning_db
from xsake._op import registry

STEPS = ("check", "autotune", "refresh", "race", "gate")
# Shapes, contestants beside ours and the backend, and whether gradients race too.
RACES = (
    ("4x4096x12x64,causal,dtype=float16", "cudnn", False),
    ("4x4096x16x128,causal,dtype=float16", "cudnn,tokamax,fa4", False),
    ("1x32768x32x128,kv=8,causal,dtype=float16", "cudnn", False),
    ("1x16384x16x128,dtype=float16", "cudnn", True),
    ("1x16384x16x128,causal,dtype=float16,density=0.1", "cudnn,flex", False),
)


TUNED = ("4x4096x12x64,causal,dtype=float16", "1x16384x16x64,dtype=float16")
GATED = "4x4096x12x64,causal,dtype=float16"
LET_ROUND = {"JAX_MOSAIC_ROUNDS": "1"}


def command(step: str, *words: str, unsaid: tuple[str, ...] = (), **environment: str) -> Row:
    """Run `xsake` with these words, and with others that the record leaves out: files of this machine."""
    given = [sys.executable, "-m", "xsake", *words, *unsaid]
    start = time.monotonic()
    run = subprocess.run(given, capture_output=True, text=True, env=os.environ | {"COLUMNS": "240"} | environment)
    seconds = time.monotonic() - start
    text = run.stdout + (run.stderr if run.returncode else "")
    said = [line.rstrip() for line in text.replace(f"{tempfile.gettempdir()}/", "").splitlines()]
    row = {"step": step, "command": " ".join(["xsake", *words]), "seconds": seconds, "exit_code": run.returncode}
    print(f"{row['command']}: {seconds:.1f} s, exit code {run.returncode}", *said, sep="\n", flush=True)
    return row | {"said": said}


def checked(backend: str) -> Row:
    row = command("check", "check", backend)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in row["said"] if line.startswith("│")]
    row["checks"] = {title: rest for title, *rest in cells}
    counts = re.search(
        r"(\d+) of (\d+) checks hold(?: \((\d+) without gradients\))?, (\d+) fail, (\d+)", row["said"][-1]
    )
    if counts is not None:
        names = ("hold", "all", "without_gradients", "fail", "refused")
        row["counts"] = {name: int(n or 0) for name, n in zip(names, counts.groups(), strict=True)}
    return row


def tuned(backend: str, shapes: list[str], seconds: int, folder: Path) -> Row:
    calls = [word for shape in shapes for word in ("--from-call", shape)]
    words = ("--implementation", backend, "--densities", "1", "--budget", f"{seconds}s")
    return command("autotune", "autotune", *calls, *words, unsaid=("--out", str(folder)))


def refreshed(entries: int, folder: Path) -> Row:
    """Races some of the entries that come with xsake again: all of them would take minutes."""
    kind = jax.devices()[0].device_kind
    database = tuning_db.Database.read(tuning_db.lookup.SHIPPED / tuning_db.file_name(kind))
    every = [entry for entry in database.entries if entry.key.operation != tuning_db.HADS]
    some = [every[round(at)] for at in np.linspace(0, len(every) - 1, entries)]
    folder.mkdir()
    text = tuning_db.Database(kind, some, database.environments).dump()
    (folder / tuning_db.file_name(kind)).write_text(text)
    return command("refresh", "autotune", "--refresh", unsaid=("--out", str(folder)))


def raced(shape: str, against: str, gradients: bool, rounds: int, folder: Path) -> Row:
    path = folder / "race.json"
    path.unlink(missing_ok=True)
    words = ["race", "--shape", shape, "--against", against, "--rounds", str(rounds)]
    more = ["--gradients"] if gradients else []
    row = command("race", *words, *more, unsaid=("--json", str(path)), **LET_ROUND)
    return row | {"shape": shape, "numbers": json.loads(path.read_text()) if path.exists() else None}


def gated(backend: str, shape: str, folder: Path) -> list[Row]:
    stored = ("--storage", str(folder))
    first = command("gate", "gate", "--record", "--shape", shape, "--implementation", backend, unsaid=stored)
    return [first, command("gate", "gate", unsaid=stored)]


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", type=listed(among=STEPS), default=[*STEPS], help="some of the steps")
    options.add_argument("--backend", default="jax_mosaic")
    options.add_argument("--shapes", action="append", help="race, tune and gate these alone")
    options.add_argument("--seconds", type=int, default=25, help="of tuning")
    options.add_argument("--entries", type=int, default=4, help="of the shipped database, to race again")
    args = options.parse_args()
    registry.check_name(args.backend)
    races = [(shape, "dense", False) for shape in args.shapes or ()] or list(RACES)
    rows = Record("gpu_workbench", args.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "check" in args.only:
            rows.add(checked(args.backend))
        if "autotune" in args.only:
            rows.add(tuned(args.backend, args.shapes or list(TUNED), args.seconds, folder))
        if "refresh" in args.only:
            rows.add(refreshed(args.entries, folder / "shipped"))
        for shape, against, gradients in races if "race" in args.only else ():
            rows.add(raced(shape, f"{args.backend},{against}", gradients, args.rounds, folder))
        if "gate" in args.only:
            rows.add(*gated(args.backend, (args.shapes or [GATED])[0], folder))
    show(["command", "s", "exit code"], [[row["command"], f"{row['seconds']:.1f}", row["exit_code"]] for row in rows])


if __name__ == "__main__":
    main()
