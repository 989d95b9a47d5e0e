"""The HADS study on one GPU: a model under every method, budget and text, from a folder of prepared inputs.

    python -m benchmarks.hads INPUTS --out DIR                       everything, in the order of importance
    python -m benchmarks.hads INPUTS --out DIR --minutes 4           as far as four minutes go
    python -m benchmarks.hads INPUTS --out DIR --length 4096 --stage screen,full
    python -m benchmarks.hads INPUTS --out DIR --length 32768 --batch 1 --stage calibrate,long --calibration 2

INPUTS holds the model's GGUF file, whole (`*.gguf`) or in pieces (`*.gguf.00`, `*.gguf.01`, ...), and `texts.npz` of
`benchmarks.hads.texts`. The files that a run leaves in DIR (a profile, records, summaries) may be put back into INPUTS:
the next run goes on from there; so it does from files that are in DIR already, and records may be compressed
(`records-*.jsonl.xz`). Files of a model other than SmolLM2 carry its name. Needs `gguf`, and neither
`tokenizers` nor the command line.

Stages: `calibrate` (skipped where INPUTS has the profile), `first` (HADS, oracles and the strongest rivals on the first
texts), `screen` (every method on 16 texts), `tasks`, `last_rows` (the last rows' weight given to every method, and to
none), `seed` (the project's first table), `full` (HADS, the three best rivals and the oracles on all texts). Only
where it is named: `long`, for texts that take a second per method: HADS, the oracles and every rival on one text after
the other, at 20% and 10% of the blocks and then at 43% and 30%. It needs the profile. Programs are compiled side by
side while the model is calibrated.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import xsake
from benchmarks import record
from benchmarks.hads.compile_ahead import compile_calibration, compile_evaluation
from benchmarks.hads.methods import ABLATIONS, METHODS, ORACLES, OURS, RIVALS
from benchmarks.hads.pretrained import attention_16, join
from benchmarks.hads.settings import BUDGETS, FIRST, LONG_METHODS, Settings
from benchmarks.hads.stages import BY_DEFAULT, STAGES
from benchmarks.hads.study import Study
from benchmarks.harness.script import listed
from xsake.model import load_pretrained
from xsake.model.weights.published import name_of


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hads", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for profile, records and summaries")
    parser.add_argument(
        "--work", type=Path, default=record.ROOT / "out" / "hads_study", help="folder for compiled programs"
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--block-q", type=int, default=0, help="tokens of a row of blocks; by default the block")
    parser.add_argument("--stage", type=listed(among=STAGES), default=[*BY_DEFAULT], help="stages to run")
    parser.add_argument("--methods", type=listed(among=METHODS), help="methods to run; by default all of the stages'")
    parser.add_argument(
        "--name", help="what files and records call the model; by default the name of a published model"
    )
    parser.add_argument(
        "--budgets", type=listed(float), default=[*BUDGETS], help="shares of blocks, in order of importance"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so long; the rest is left for another run"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences at a time")
    parser.add_argument("--sequences", type=int, default=64, help="evaluate on at most so many sequences per domain")
    parser.add_argument("--calibration", type=int, default=4, help="sequences per domain to calibrate on")
    args = parser.parse_args()
    methods = args.methods or (LONG_METHODS if set(args.stage) <= {"calibrate", "long"} else METHODS)
    start = time.perf_counter()
    jax.config.update("jax_compilation_cache_dir", str(args.work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    on_cpu = jax.default_backend() == "cpu"
    attention = xsake.attention if on_cpu else attention_16
    file = join(args.inputs, args.work)
    model = load_pretrained(file, dtype=jnp.float32, param_dtype=jnp.float32, attention_fn=attention)
    settings = Settings(
        length=args.length,
        block=args.block,
        block_q=args.block_q,
        batch=args.batch,
        sequences=args.sequences,
        calibration_sequences=args.calibration,
        name=args.name or name_of(str(file)),
        budgets=tuple(args.budgets),
        methods=tuple(methods),
        # float16 has 10 bits of mantissa, as the other products (TF32): bfloat16's rounding would show in small KL.
        attention_dtype=None if on_cpu else jnp.float16,
    )
    study = Study(
        model,
        args.inputs / "texts.npz",
        args.out,
        settings,
        earlier=args.inputs,
        stop=lambda: time.perf_counter() - start > 60 * args.minutes,
    )
    study.start = start
    study.say(f"model loaded; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    if "calibrate" in args.stage:
        compile_calibration(study)
    if set(args.stage) - {"calibrate"}:
        compile_evaluation(study, study.wanted([*LONG_METHODS, *FIRST, *OURS, *ABLATIONS, *ORACLES, *RIVALS]))
    for name, stage in STAGES.items():
        if name in args.stage and not study.stop():
            study.say(f"-- {name}")
            stage(study)
    study.say("done")


if __name__ == "__main__":
    main()
