"""RULER's thirteen tasks, and two more, on a model that reads densely, with HADS or by other methods' equal blocks.

    python -m benchmarks.ruler smollm2 --out ruler.jsonl
    python -m benchmarks.ruler qwen2.5-coder-1.5b --profile qwen-32768.json --lengths 4096,8192,16384,32768 \\
        --methods dense,hads,oracle_gain,flash_prefill+forced,x_attention_8+forced --budgets 0.2,0.1 --out ruler.jsonl
    python -m benchmarks.ruler smollm2 --tasks beyond --samples 32 --out ruler.jsonl    near copies, long copies
    python -m benchmarks.ruler smollm2 --tasks needle --samples 2 --out ruler.jsonl       for the picture
    python -m benchmarks.ruler.picture ruler.jsonl --out needles.png
    python -m benchmarks.ruler qwen.gguf --prompts prompts.npz --out ruler.jsonl    prompts of benchmarks.ruler.prepared

A prompt and its answer have at most the given length. The prompt is read under a method's masks; the answer is written
greedily, and attends to all tokens. HADS reads as `xsake generate --hads` does; other methods read in one piece.

Answers are appended to FILE.jsonl as they come: a run that was cut off goes on where it stopped, and loses at most the
batch in flight. Scores go to FILE.json. Tasks run from 1024 tokens on; RULER's own lengths begin at 4096.

Needs the model's file and what reads it: pip install 'xsake[model]' (flax, gguf, jinja2, tokenizers); with --prompts
only flax and gguf. The network is used only to fetch a published model that is not there yet. The haystack is the prose
of Python's language reference, which comes with Python, or the text that --essay names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import record
from benchmarks.harness.models import load, own_profile
from benchmarks.harness.script import listed
from benchmarks.ruler.essay import Essay
from benchmarks.ruler.prepared import Prepared
from benchmarks.ruler.prompt import Made, tasks_named
from benchmarks.ruler.prompt_layer import METHODS_HERE
from benchmarks.ruler.run import run
from benchmarks.ruler.summary import as_json, beyond, summarise, tables
from benchmarks.ruler.tasks import BEYOND, NEEDLE, TASKS
from benchmarks.ruler.way import Way, ways_of
from xsake._ground import atomic
from xsake.hads.profile.profile import HadsProfile, shipped_file
from xsake.hads.study.records import Records
from xsake.model.weights.published import name_of


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        _main(args)
    except (ValueError, OSError, NotImplementedError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ruler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a published model (smollm2, qwen2.5-coder-1.5b), or a GGUF or safetensors file")
    parser.add_argument("--out", type=Path, required=True, help="records, one JSON line per answer")
    parser.add_argument("--lengths", type=listed(int), default=[4096, 8192], help="tokens of a prompt with its answer")
    parser.add_argument(
        "--methods", default="dense,hads", help=f"dense, hads, {', '.join(METHODS_HERE)}, comma-separated"
    )
    parser.add_argument("--budgets", default="0.2,0.1", help="shares of the blocks, comma-separated")
    parser.add_argument(
        "--tasks",
        type=listed(),
        default=["all"],
        help=f"all, beyond, {NEEDLE} (for the picture), {', '.join(TASKS | BEYOND)}",
    )
    parser.add_argument("--samples", type=int, default=10, help="per task and length; per depth for the needle")
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time, of one task")
    parser.add_argument(
        "--chunk", type=int, help="dense and hads read so many tokens at a time; by default all at once"
    )
    parser.add_argument(
        "--profile", type=Path, help="of `xsake calibrate`; by default the one that comes with xsake; dense needs none"
    )
    parser.add_argument("--prompts", type=Path, help="prompts of benchmarks.ruler.prepared: no tokenizer is needed")
    parser.add_argument("--name", help="the model's name in profile, prompts and records; by default that of its file")
    parser.add_argument("--essay", type=Path, help="plain text for the haystack, its paragraphs between empty lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after so long; the rest is left for another run"
    )
    return parser


def _main(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    # First what can be refused at once.
    if args.samples < 1 or args.batch < 1:
        raise ValueError(f"--samples {args.samples} and --batch {args.batch} must be at least 1")
    ways, tasks = ways_of(args.methods, args.budgets), tasks_named(args.tasks)
    if not ways:
        raise ValueError("--methods names no method")
    lengths = args.lengths
    name = args.name or name_of(args.model)
    prepared = None if args.prompts is None else _prepared(args, name)
    profiles = {str(length): _profile(name, length, args.profile, ways) for length in lengths}
    summary = args.out.with_suffix(".json")
    if summary == args.out:
        raise ValueError(f"--out {args.out} is for records, one JSON line each: name a .jsonl file")

    prompts: Made | Prepared
    model, opened = _load(args.model)
    if prepared is not None:
        prompts, digest, seed = prepared, prepared.digest, prepared.seed
    else:
        from xsake.model import load_tokenizer

        essay = Essay.python_reference() if args.essay is None else Essay.read(args.essay)
        prompts, digest, seed = Made(load_tokenizer(opened), essay, args.seed), essay.digest, args.seed
    about = {
        "benchmark": "ruler",
        "model": name,
        "dtype": str(np.dtype(model.dtype)),
        "profile": {n: one and _digest(args.profile or shipped_file(name, int(n))) for n, one in profiles.items()},
        "essay": digest,
        "seed": seed,
        "chunk": args.chunk,
    }
    records = Records(args.out, about)
    console = Console(width=None if Console().is_terminal else 170)
    total, seen = len(tasks) * args.samples * len(lengths) * len(ways), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        shown = bar.add_task("", total=total)

        def report(what: str, more: int) -> None:
            nonlocal seen
            seen += more
            bar.update(shown, description=what, completed=seen)
            if more and not console.is_terminal:  # a log shows no bar
                print(f"[{time.perf_counter() - start:7.1f} s] {seen} of {total}: {what}", flush=True)

        done = run(
            model,
            prompts,
            records,
            tasks=tasks,
            lengths=lengths,
            ways=ways,
            samples=args.samples,
            profile_for=lambda length: profiles[str(length)],
            batch=args.batch,
            chunk=args.chunk,
            progress=report,
            stop=lambda: time.perf_counter() - start > 60 * args.minutes,
        )
    rows, others = summarise(records), beyond(records)
    found = {"environment": record.environment(), "about": about, "scores": as_json(rows), "beyond": as_json(others)}
    atomic.write_text(summary, json.dumps(found, indent=1) + "\n")
    for table in tables(rows) + tables(others, "answers that RULER does not ask for"):
        console.print(table)
    console.print(f"{len(records)} answers are in {args.out}, scores in {summary}", soft_wrap=True)
    if not done:
        console.print("The time is over before all was done: run again to go on.")


def _profile(name: str, length: int, path: Path | None, ways: Sequence[Way]) -> HadsProfile | None:
    """None if no profile is given, none comes with xsake, and every way is dense."""
    try:
        return own_profile(name, length, path)
    except FileNotFoundError:
        if path is None and all(way.method == "dense" for way in ways):
            return None
        raise


def _digest(file: Any) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _prepared(args: argparse.Namespace, name: str) -> Prepared:
    if args.essay is not None or args.seed:
        raise ValueError("--essay and --seed are for prompts that are made now: leave them out with --prompts")
    found = Prepared.load(args.prompts)
    if found.model != name:
        raise ValueError(f"{args.prompts} holds prompts of {found.model!r}, not of {name!r}: prepare them for it")
    return found


def _load(name: str) -> tuple[Any, Any]:
    """The model, and the opened file of which its tokenizer can be read."""
    import jax

    from xsake.model import open_model
    from xsake.model.weights.fetch import cache_folder

    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    opened = open_model(name)
    return load(opened), opened


if __name__ == "__main__":
    main()
