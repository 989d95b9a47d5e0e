"""Time to the first token of one long prompt, the whole model: dense by cuDNN, dense by xsake, and with HADS.

    python -m benchmarks.gpu.prompt                       Qwen2.5-1.5B at 32768 tokens, SmolLM2 at 8192, print
    python -m benchmarks.gpu.prompt --record              also write benchmarks/results/gpu_prompt.json
    python -m benchmarks.gpu.prompt --out DIR             write the run to DIR
    python -m benchmarks.gpu.prompt --models FILE.gguf --texts texts.npz --profile FILE     a model's own weights
    python -m benchmarks.gpu.prompt --models tiny --budgets 0.5 --dense xla     a small run, anywhere

Of a model that is named here, the weights are random and the profile is made from them. A budget fixes how many blocks
are kept; how they are spread over heads and rows, only a model's own weights show: a file is read with its profile, and
the first of the texts (a file of `benchmarks.hads.texts`) is the prompt. A run reads the prompt and computes the logits
of the token after it. cuDNN's is one program of all layers; xsake's are a program per layer and chunk, as `xsake
generate` runs them. `MFU` counts the products of one dense forward, with one row of logits, over the chip's peak. The
record also has each kernel's time.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.harness import turns
from benchmarks.harness.kernel_times import kernel_times
from xsake._plan.models import PUBLISHED
from xsake.autotune.measure.timing import race
from xsake.hads import HadsProfile, calibrate
from xsake.hads.study.texts import load_texts
from xsake.model import PRESETS, HadsBudget, ModelConfig, Transformer, load_pretrained
from xsake.model.generation.prefill import read_prompts
from xsake.model.training.watch.mfu import utilisation
from xsake.model.weights.published import name_of

MODELS = {
    "qwen2.5-1.5b": (dataclasses.replace(PUBLISHED["qwen2.5-1.5b"], qkv_bias=True), 32768, 4096),
    "smollm2-135m": (PRESETS["smollm2-135m"], 8192, 2048),
    "tiny": (PRESETS["tiny"], 512, 256),
}
FILES_AS = "qwen2.5-1.5b"  # a model that is a file reads as many tokens as this one, in chunks of as many


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def make(config: ModelConfig) -> Transformer:
    """With random weights, drawn array by array: one program for all of them takes a GPU 100 s to compile."""

    def shapes_of() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

    graph, shapes = nnx.split(nnx.eval_shape(shapes_of))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if len(leaf.shape) > 1:
            return _normal(next(keys), leaf.shape, leaf.dtype)
        is_bias = "bias" in jax.tree_util.keystr(path)
        return jnp.zeros(leaf.shape, leaf.dtype) if is_bias else jnp.ones(leaf.shape, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))


def profile_of(model: Transformer, block: int) -> HadsProfile:
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 16 * block))
    return calibrate(model, tokens, name="random", block=block, steps=20)


# Weights are lists of arrays: jit would take a model of modules apart for milliseconds in every call.
@partial(jax.jit, static_argnums=0)
def whole(tree: Any, weights: list[Array], tokens: Array) -> Array:
    model: Transformer = jax.tree.unflatten(tree, weights)
    return model.logits(model.hidden(tokens)[:, -1:])


@partial(jax.jit, static_argnums=0)
def logits(tree: Any, weights: list[Array], last: Array) -> Array:
    model: Transformer = jax.tree.unflatten(tree, weights)
    return model.logits(model.norm(last))


def reader(model: Transformer, tokens: np.ndarray, **options: Any) -> Callable[[], Array]:
    weights, tree = jax.tree.flatten(model)

    def read() -> Array:
        return logits(tree, weights, read_prompts(model, [tokens], capacity=len(tokens), **options).last)

    return read


class Subject(NamedTuple):
    """What reads, and what it reads."""

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
        made = HadsProfile.load(profile) if profile else profile_of(model, 64 if length >= 4096 else 16)
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


def compile_all(runs: Iterable[Callable[[], Any]]) -> None:
    """Side by side."""
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda run: jax.block_until_ready(run()), runs):
            pass


def measure(subject: Subject, contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    config, length = subject.model.config, len(subject.tokens)
    times = race(contenders, rounds=rounds)
    flops = config.flops_per_token(length) / 3 - 2 * config.vocab_size * config.width
    return {
        "model": subject.name,
        "length": length,
        "mfu": {
            way: utilisation(flops, length / time.median, jax.devices()[0].device_kind, 1)
            for way, time in times.items()
            if way.startswith("dense")
        },
        "seconds": {way: dataclasses.asdict(time) for way, time in times.items()},
        "kernels": {way: kernel_times(run) for way, run in contenders.items()},
    }


def show(rows: list[dict[str, Any]], dense: str) -> None:
    table = Table("model", "tokens", "way", "ms", "quartiles", f"times dense by {dense}", "MFU")
    for row in rows:
        peer = row["seconds"][f"dense by {dense}"]["median"]
        for way, time in row["seconds"].items():
            share = row["mfu"].get(way)
            table.add_row(
                row["model"],
                str(row["length"]),
                way,
                f"{time['median'] * 1e3:.1f}",
                f"{time['low'] * 1e3:.1f}-{time['high'] * 1e3:.1f}",
                f"{peer / time['median']:.2f}",
                "" if share is None else f"{share:.0%}",
            )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-1.5b,smollm2-135m", help=f"of {', '.join(MODELS)}; or files")
    parser.add_argument("--texts", type=Path, help="tokens for a model that is a file")
    parser.add_argument("--budgets", default="0.2,0.1")
    parser.add_argument("--dense", default="cudnn", choices=["cudnn", "xla"])
    parser.add_argument("--profile", type=Path, help="of a model with these heads, in place of one that is made here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    budgets = list(map(float, args.budgets.split(",")))
    subjects = [
        Subject.named(name, args.profile) if name in MODELS else Subject.of_file(name, args.profile, args.texts)
        for name in args.models.split(",")
    ]
    contenders = [contenders_of(subject, args.dense, budgets) for subject in subjects]
    compile_all(run for ways in contenders for run in ways.values())
    turns.begin()
    rows = []
    for subject, ways in zip(subjects, contenders, strict=True):
        rows.append(measure(subject, ways, args.rounds))
        if args.record or args.out:
            record.save("gpu_prompt", rows, *([args.out] if args.out else []))
    show(rows, args.dense)


if __name__ == "__main__":
    main()
