"""Writing after 32768 tokens, the whole model: tokens per second, dense and with HADS, and what HADS does to quality.

    python -m benchmarks.gpu.generate                     times of Qwen2.5-1.5B with random weights, print
    python -m benchmarks.gpu.generate --record            also write benchmarks/results/gpu_generate.json
    python -m benchmarks.gpu.generate --out DIR           write the run to DIR
    python -m benchmarks.gpu.generate --model FILE.gguf --texts texts.npz --profile FILE --record
                                                          quality: benchmarks/results/gpu_generate_quality.json
    python -m benchmarks.gpu.generate --preset tiny --budgets 0.5 --new-tokens 8      a small run, anywhere

Times: a turn writes `--new-tokens` tokens per sequence as `xsake generate` does, each handed to the host, into a cache
whose last slots they fill. Keys and values in the cache are random: they do not change the time, since a budget fixes
how many blocks are read. Batches whose cache does not fit the device are left out, and named.

Quality: a text is read densely up to its last `--new-tokens` tokens; dense attention goes on greedily for as many. HADS
is fed the same tokens. KL(dense || HADS) in nats, in float32, and whether the likeliest token is the same, after each.
`--texts` is a file of `benchmarks.hads.texts`; none of its texts may have calibrated the profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.hads.texts import EVALUATION
from benchmarks.hads.written import Divergence, divergences, pool
from benchmarks.harness import turns
from benchmarks.harness.kernel_times import kernel_times
from benchmarks.harness.models import MODELS, load, make, own_profile, profile_of, unseen
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake.hads import HadsProfile
from xsake.hads.study.texts import Text, load_texts
from xsake.model import HadsBudget, KVCache, ModelConfig, Transformer
from xsake.model.generation.prefill import read_prompts
from xsake.model.generation.sampling import Sampler
from xsake.model.generation.sparse_decode import StepRule
from xsake.model.generation.writer import Writer
from xsake.model.weights.published import name_of


class Turns:
    """Writers that take turns with one cache: a second one would not fit the device at large batches."""

    def __init__(self, model: Transformer, batch: int, length: int, new: int):
        self.model, self.start = model, length - new
        self.cache = random_cache(model.config, batch, length, model.dtype)
        self.tokens = jnp.zeros(batch, jnp.int32)
        self.keys = list(jax.random.split(jax.random.key(0), new))

    def writer(self, profile: HadsProfile, budget: float | None) -> Writer:
        if budget is None:
            return Writer(self.model, self.cache, Sampler())
        hads = HadsBudget(profile, 1.0, budget)
        step = StepRule.of(hads, shortest=self.start, capacity=self.cache.capacity)
        pooled = pool(self.begun(), profile.block)
        return Writer(self.model, self.cache, Sampler(), step=step, pooled=pooled, learned=hads.learned)

    def begun(self) -> KVCache:
        """The cache as it is before every turn."""
        return dataclasses.replace(self.cache, length=jnp.full(len(self.tokens), self.start, jnp.int32))

    def take(self, writer: Writer) -> np.ndarray:
        """The tokens of a turn, i32[new, B]."""
        writer.cache = self.begun()
        written = list(writer.follow(self.tokens, self.keys))
        self.cache = writer.cache
        return np.stack(written)


def random_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    shape = (batch, capacity, config.kv_heads, config.head_dim)
    normal = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    seeds: Sequence[Array] = list(jax.random.split(jax.random.key(1), 2 * config.layers))
    keys, values = (tuple(normal(seed) for seed in seeds[part::2]) for part in range(2))
    return KVCache(keys=keys, values=values, length=jnp.zeros(batch, jnp.int32), filled=True)


def bytes_of(model: Transformer, batch: int, length: int) -> dict[str, int]:
    """Bytes that a dense step must read."""
    config, size = model.config, np.dtype(model.dtype).itemsize
    cache = 2 * config.layers * batch * length * config.kv_heads * config.head_dim * size
    return {"weights": sum(leaf.nbytes for leaf in jax.tree.leaves(model)), "cache": cache}


def misfit(model: Transformer, batch: int, length: int) -> str | None:
    """Why this batch is left out, or None."""
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    needed = sum(bytes_of(model, batch, length).values()) * 1.2  # pooled keys, and what a step computes
    if room is None or needed <= room:
        return None
    return f"batch {batch} needs about {needed / 1e9:.0f} GB, and the device has {room / 1e9:.0f} GB"


def times(
    model: Transformer, profile: HadsProfile, *, batch: int, length: int, new: int, budgets: list[float], rounds: int
) -> Row:
    writers = Turns(model, batch, length, new)
    contenders: dict[str, Callable[[], Any]] = {"dense": partial(writers.take, writers.writer(profile, None))}
    for budget in budgets:
        contenders[f"HADS {budget:.0%}"] = partial(writers.take, writers.writer(profile, budget))
    for contender in contenders.values():
        contender()  # compiles
    turns.begin()
    return {
        "batch": batch,
        "length": length,
        "new_tokens": new,
        "bytes": bytes_of(model, batch, length),
        "seconds": timings(contenders, rounds, new),
        "kernels": {way: kernel_times(run) for way, run in contenders.items()},  # of a whole turn
    }


def quality(
    model: Transformer, profile: HadsProfile, text: Text, *, new: int, budgets: list[float], chunk: int | None
) -> list[Row]:
    """A row per budget."""
    length = len(text.tokens)
    read = read_prompts(model, [text.tokens[: length - new].tolist()], capacity=length, chunk=chunk)
    about = {"text": text.name, "domain": text.domain, "document": text.document}
    about |= {"prompt": length - new, "new_tokens": new}
    found = divergences(model, profile, read, budgets, new)
    return [{**about, "budget": budget, **summary(seen)} for budget, seen in found.items()]


def summary(seen: Divergence) -> Row:
    quartiles = np.quantile(seen.kl, (0.25, 0.5, 0.75)).tolist()
    return {
        "kl": float(seen.kl.mean()),
        "kl_of_tokens": dict(zip(("low", "median", "high"), quartiles, strict=True)),
        "largest_kl": float(seen.kl.max()),
        "same_token": float(seen.same.mean()),
    }


def time_lines(row: Row) -> list[list[Any]]:
    dense, lines = row["seconds"]["dense"]["median"], []
    for way, time in row["seconds"].items():
        speed, ratio = f"{row['batch'] / time['median']:.1f}", f"{dense / time['median']:.2f}"
        lines.append([row["batch"], row["length"], way, speed, *spread(time), ratio])
    return lines


def quality_line(row: Row) -> list[str]:
    quartiles = " ".join(f"{x:.5f}" for x in row["kl_of_tokens"].values())
    numbers = [f"{row['kl']:.5f}", quartiles, f"{row['largest_kl']:.3f}", f"{row['same_token']:.1%}"]
    return [row["text"], f"{row['budget']:.0%}", *numbers]


def profile_of_run(args: argparse.Namespace, name: str, model: Transformer, length: int) -> HadsProfile:
    if args.model is not None:
        profile = own_profile(name, length, args.profile)
    else:
        profile = HadsProfile.load(args.profile) if args.profile else profile_of(model, length)
    HadsBudget(profile, 1.0).check(model.config, length)
    return profile


def run(args: argparse.Namespace) -> None:
    with_texts = args.texts is not None
    length = args.length or (32768 if args.model else MODELS[args.preset][1])
    new = args.new_tokens or (256 if with_texts else 64)
    budgets = args.budgets or ([0.1, 0.2] if with_texts else [0.1])
    if not 0 < new < length:
        raise ValueError(f"--new-tokens {new} must be at least 1 and below the {length} tokens of --length")
    if args.model is None:
        name, model = args.preset, make(MODELS[args.preset][0])
    else:
        name, model = args.name or name_of(args.model), load(args.model)
    if length > model.config.context:
        raise ValueError(f"--length {length} is beyond the model's context of {model.config.context}")
    profile = profile_of_run(args, name, model, length)
    settings = {
        "model": name,
        "weights": "random" if args.model is None else Path(args.model).name,
        "dtype": str(np.dtype(model.dtype)),
        "block": profile.block,
        "length": length,
        "profile": None if args.profile is None else hashlib.sha256(args.profile.read_bytes()).hexdigest()[:16],
    }
    rows = Record("gpu_generate_quality" if with_texts else "gpu_generate", args.out, settings=settings)

    def keep(*more: Row) -> None:
        rows.add(*more)
        print(*more, sep="\n", flush=True)

    if with_texts:
        texts = load_texts([args.texts], length=length, limit=args.sequences, domains=args.domains)
        for text in unseen(texts, profile):
            keep(*quality(model, profile, text, new=new, budgets=budgets, chunk=args.chunk))
        show(["text", "budget", "KL", "quartiles", "largest", "same token"], map(quality_line, rows))
        return
    for batch in args.batches:
        if why := misfit(model, batch, length):
            print(f"left out: {why}", flush=True)
            continue
        shape = dict(batch=batch, length=length, new=new)
        keep(times(model, profile, **shape, budgets=budgets, rounds=args.rounds))
    columns = ["batch", "tokens", "way", "tokens/s", "ms per step", "quartiles", "times dense"]
    show(columns, [line for row in rows for line in time_lines(row)])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--preset", default="qwen2.5-1.5b", choices=list(MODELS), help="a shape, with random weights")
    options.add_argument("--model", help="a published model or a GGUF or safetensors file, in place of --preset")
    options.add_argument("--name", help="the model's name in profiles; by default that of its file")
    options.add_argument(
        "--profile", type=Path, help="by default the one that comes with xsake, or is made of a preset"
    )
    options.add_argument("--texts", type=Path, help="measure quality on these texts instead of times")
    options.add_argument("--domains", type=listed(), default=[*EVALUATION], help="of the texts")
    options.add_argument("--sequences", type=int, default=3, help="texts per domain")
    options.add_argument("--chunk", type=int, help="tokens of a text that are read at a time; by default all")
    options.add_argument("--length", type=int, help="tokens in the cache at the end; 32768, or the preset's")
    options.add_argument("--new-tokens", type=int, help="tokens per sequence; 64 for times, 256 for quality")
    options.add_argument(
        "--budgets", type=listed(float), help="shares of the cache's blocks; 0.1 for times, 0.1,0.2 for quality"
    )
    options.add_argument("--batches", type=listed(int), default=[1, 8, 32], help="sequences at a time, for times")
    args = options.parse_args(arguments)
    try:
        run(args)
    except (ValueError, OSError) as error:
        options.error(str(error))


if __name__ == "__main__":
    main()
