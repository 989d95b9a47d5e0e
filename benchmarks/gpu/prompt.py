"""Time to the first token of one long prompt, the whole model: dense by cuDNN, dense by xsake, and with HADS.

    python -m benchmarks.gpu.prompt                       Qwen2.5-1.5B at 32768 tokens, SmolLM2 at 8192, print
    python -m benchmarks.gpu.prompt --record              also write benchmarks/results/gpu_prompt.json
    python -m benchmarks.gpu.prompt --out DIR             write the run to DIR
    python -m benchmarks.gpu.prompt --models FILE.gguf --texts texts.npz --profile FILE     a model's own weights
    python -m benchmarks.gpu.prompt --lengths 65536,131072 --models qwen2.5-1.5b,llama-8b --budgets 0.2,0.1,0.05 \\
        --chunk 32768 --rounds 2 --record                long prompts, into benchmarks/results/gpu_prompt_long.json
    python -m benchmarks.gpu.prompt --models tiny --budgets 0.5 --dense xla     a small run, anywhere

A model that is named here has random weights, and the profile is made from them. A budget fixes how many blocks
are kept; how they are spread over heads and rows, only a model's own weights show: a file is read with its profile, and
the first of the texts (a file of `benchmarks.hads.texts`) is the prompt. A run reads the prompt and computes the logits
of the token after it. cuDNN's is one program of all layers; xsake's are a program per layer and chunk, as `xsake
generate` runs them. `MFU` counts the products of one dense forward, with one row of logits, over the chip's peak. The
record also has each kernel's time.

With `--lengths`, reading takes seconds, so that nothing is read for nothing: one layer compiles all programs, cuDNN's
is a program per layer too, a turn is a single call, and the kernels' times are those of one layer. `--layers 4` makes
models of four layers, where whole ones would take too long: layers are alike, and the record has both numbers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.harness import turns
from benchmarks.harness.kernel_times import kernel_times
from benchmarks.harness.models import MODELS, lent_profile, make, profile_of
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake._measure.timing import Timing, default_pause, in_turns, seconds_per_call
from xsake._race.course import compile_all
from xsake.hads import HadsProfile
from xsake.hads.study.texts import load_texts
from xsake.model import HadsBudget, Transformer, load_pretrained
from xsake.model.generation.prefill import read_prompts
from xsake.model.training.watch.mfu import utilisation
from xsake.model.weights.published import name_of

MOST_CHARACTERS = 400  # of an error that a record keeps
AT_ONCE = 3  # long prompts that are compiled at once: each runs a layer
MOST_COLUMNS = 4096  # blocks per row
COLUMNS = ["model", "tokens", "way", "ms", "quartiles", "times dense", "MFU"]
FILES_AS = "qwen2.5-1.5b"  # a model that is a file reads as many tokens as this one, in chunks of as many


# Weights are lists of arrays: jit would take a model of modules apart for milliseconds in every call.
@partial(jax.jit, static_argnums=0)
def whole(tree: Any, weights: list[Array], tokens: Array) -> Array:
    model: Transformer = jax.tree.unflatten(tree, weights)
    return model.logits(model.hidden(tokens)[:, -1:])


@partial(jax.jit, static_argnums=0)
def logits(tree: Any, weights: list[Array], last: Array) -> Array:
    model: Transformer = jax.tree.unflatten(tree, weights)
    return model.logits(model.norm(last))


def reader(model: Transformer, tokens: np.ndarray, *, layers: int | None = None, **options: Any) -> Callable[[], Array]:
    """Reads the prompt by the first `layers` of the model, or by all."""
    weights, tree = jax.tree.flatten(model)
    part = copy.copy(model)
    part.blocks = nnx.List(model.blocks[:layers])

    def read() -> Array:
        return logits(tree, weights, read_prompts(part, [tokens], capacity=len(tokens), **options).last)

    return read


class Subject(NamedTuple):
    """A model with its profile, and the prompt that it reads."""

    name: str
    model: Transformer
    profile: HadsProfile
    tokens: np.ndarray
    chunk: int

    @classmethod
    def named(cls, name: str, profile: Path | None) -> Subject:
        config, length, chunk = MODELS[name]
        model = make(config)
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, length, np.int32)
        made = HadsProfile.load(profile) if profile else profile_of(model, length)
        return cls(name, model, made, tokens, chunk)

    @classmethod
    def of_file(cls, path: str, profile: Path | None, texts: Path | None) -> Subject:
        if profile is None or texts is None:
            raise SystemExit(f"{path} is a file, not one of {', '.join(MODELS)}: it needs --profile and --texts")
        _, length, chunk = MODELS[FILES_AS]
        model = load_pretrained(path, param_dtype=jnp.bfloat16)
        tokens = load_texts([texts], length=length, limit=1)[0].tokens
        return cls(name_of(path), model, HadsProfile.load(profile), np.asarray(tokens, np.int32), chunk)


def contenders_of(subject: Subject, dense: str, budgets: list[float]) -> dict[str, Callable[[], Any]]:
    _, model, profile, tokens, chunk = subject
    peer = copy.copy(model)
    peer.attention_fn = partial(jax.nn.dot_product_attention, implementation=dense)
    weights, tree = jax.tree.flatten(peer)
    contenders: dict[str, Callable[[], Any]] = {
        f"dense by {dense}": partial(whole, tree, weights, jnp.asarray(tokens)[None]),
        "dense": reader(model, tokens),
    }
    for budget in budgets:
        contenders[f"HADS {budget:.0%}"] = reader(model, tokens, hads=HadsBudget(profile, prompt=budget))
    hads = HadsBudget(profile, prompt=budgets[0])
    contenders[f"HADS {budgets[0]:.0%}, chunks of {chunk}"] = reader(model, tokens, hads=hads, chunk=chunk)
    contenders[f"dense, chunks of {chunk}"] = reader(model, tokens, chunk=chunk)
    return contenders


def measure(subject: Subject, contenders: dict[str, Callable[[], Any]], rounds: int) -> Row:
    config, length = subject.model.config, len(subject.tokens)
    seconds = timings(contenders, rounds)
    flops = config.flops_per_token(length) / 3 - 2 * config.vocab_size * config.width
    return {
        "model": subject.name,
        "length": length,
        "mfu": {
            way: utilisation(flops, length / time["median"], jax.devices()[0].device_kind, 1)
            for way, time in seconds.items()
            if way.startswith("dense")
        },
        "seconds": seconds,
        "kernels": {way: kernel_times(run) for way, run in contenders.items()},
    }


Ways = dict[str, Callable[..., Callable[[], Array]]]  # a reader of each way, or of the model's first `layers` alone


@dataclasses.dataclass(frozen=True)
class LongRead:
    """A prompt of one length for one model."""

    name: str
    model: Transformer
    profile: HadsProfile
    tokens: np.ndarray

    @classmethod
    def of(cls, name: str, model: Transformer, profile: HadsProfile, length: int) -> LongRead:
        model = copy.copy(model)
        model.config = config = dataclasses.replace(model.config, context=max(model.config.context, length))
        block = min(max(32, length // MOST_COLUMNS), 128)
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, length, np.int32)
        return cls(name, model, profile.in_blocks(block, block_q=128), tokens)

    def ways(self, dense: str, budgets: list[float], chunk: int | None) -> Ways:
        peer = copy.copy(self.model)
        peer.attention_fn = partial(jax.nn.dot_product_attention, implementation=dense)
        own = partial(reader, self.model, self.tokens)
        found: Ways = {
            f"dense by {dense}": partial(reader, peer, self.tokens),
            "dense": own,
        }
        hads = {budget: HadsBudget(self.profile, prompt=budget) for budget in budgets}
        found |= {f"HADS {budget:.0%}": partial(own, hads=hads[budget]) for budget in budgets}
        if chunk is not None and chunk < len(self.tokens):
            found[f"HADS {budgets[0]:.0%}, chunks of {chunk}"] = partial(own, hads=hads[budgets[0]], chunk=chunk)
            found[f"dense, chunks of {chunk}"] = partial(own, chunk=chunk)
        return found

    def measure(self, ways: Ways, rounds: int) -> Row:
        """A way that fails leaves its error's words in the row."""
        failed: dict[str, str] = {}

        def tried(way: str, run: Callable[[], Any]) -> Any:
            try:
                return run()
            except Exception as error:
                failed[way] = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]

        def wait(way: str, run: Callable[[], Array]) -> Any:
            return tried(way, lambda: jax.block_until_ready(run()))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(wait, ways, (make(layers=1) for make in ways.values())))
        print(f"{self.name}, {len(self.tokens)} tokens: compiled", flush=True)

        def turn(way: str) -> Any:
            return None if way in failed else tried(way, partial(seconds_per_call, ways[way](), 1))

        seconds = in_turns(ways, turn, rounds=rounds, pause=default_pause())
        memory = jax.devices()[0].memory_stats() or {}
        done = {way: found for way, found in seconds.items() if way not in failed}
        return {
            "model": self.name,
            "length": len(self.tokens),
            "layers": self.model.config.layers,
            "of": MODELS[self.name][0].layers,
            "blocks": [self.profile.block_q, self.profile.block],
            "seconds": {way: dataclasses.asdict(Timing.of(found)) for way, found in done.items()},
            "failed": failed,
            "peak": memory.get("peak_bytes_in_use"),
            "kernels": {way: tried(way, partial(kernel_times, ways[way](layers=1))) for way in done if "," not in way},
        }


def profile_for(model: Transformer, length: int) -> HadsProfile:
    return lent_profile(model.config) if model.config.head_dim == 128 else profile_of(model, length)


def measure_long(args: argparse.Namespace) -> None:
    rows = Record("gpu_prompt_long", args.out)
    for name in args.models:
        config = MODELS[name][0]
        model = make(dataclasses.replace(config, layers=args.layers or config.layers))
        profile = HadsProfile.load(args.profile) if args.profile else profile_for(model, min(args.lengths))
        for length in args.lengths:
            one = LongRead.of(name, model, profile, length)
            rows.add(one.measure(one.ways(args.dense, args.budgets, args.chunk), args.rounds))
            show(COLUMNS[:-1], long_lines(rows[-1], args.dense))


def long_lines(row: Row, dense: str) -> list[list[Any]]:
    by, lines = row["seconds"], []
    peer = by.get(f"dense by {dense}", {}).get("median", float("nan"))
    what = f"{row['model']}, {row['layers']} of {row['of']} layers"
    for way, time in by.items():
        lines.append([what, row["length"], way, *spread(time, digits=1), f"{peer / time['median']:.2f}"])
    return lines + [[what, row["length"], way, "failed", words, ""] for way, words in row["failed"].items()]


def lines_of(row: Row, dense: str) -> list[list[Any]]:
    peer, lines = row["seconds"][f"dense by {dense}"]["median"], []
    for way, time in row["seconds"].items():
        mfu, ratio = row["mfu"].get(way), f"{peer / time['median']:.2f}"
        told = "" if mfu is None else f"{mfu:.0%}"
        lines.append([row["model"], row["length"], way, *spread(time, digits=1), ratio, told])
    return lines


def main() -> None:
    options = parser(__doc__, rounds=5, dense=True)
    options.add_argument(
        "--models", type=listed(), default=["qwen2.5-1.5b", "smollm2-135m"], help=f"of {', '.join(MODELS)}; or files"
    )
    options.add_argument("--texts", type=Path, help="tokens for a model that is a file")
    options.add_argument("--budgets", type=listed(float), default=[0.2, 0.1])
    options.add_argument("--profile", type=Path, help="of a model with these heads, in place of one that is made here")
    options.add_argument("--lengths", type=listed(int), help="long prompts, in place of the models' own lengths")
    options.add_argument("--chunk", type=int, help="with --lengths: read in chunks of so many tokens too")
    options.add_argument("--layers", type=int, help="with --lengths: models of so many layers")
    args = options.parse_args()
    if args.lengths:
        measure_long(args)
        return
    subjects = [
        Subject.named(name, args.profile) if name in MODELS else Subject.of_file(name, args.profile, args.texts)
        for name in args.models
    ]
    contenders = [contenders_of(subject, args.dense, args.budgets) for subject in subjects]
    compile_all(run for ways in contenders for run in ways.values())
    turns.begin()
    rows = Record("gpu_prompt", args.out)
    for subject, ways in zip(subjects, contenders, strict=True):
        rows.add(measure(subject, ways, args.rounds))
    show(COLUMNS, [line for row in rows for line in lines_of(row, args.dense)])


if __name__ == "__main__":
    main()
