"""Prompts made beforehand, for a machine that has no tokenizer: token numbers, answers, and the bytes of every token.

    python -m benchmarks.ruler.prepared qwen2.5-coder-1.5b --lengths 32768,8192 --samples 4 --out prompts.npz
    python -m benchmarks.ruler qwen2.5-coder-1.5b --prompts prompts.npz --lengths 32768,8192 --samples 4 --out r.jsonl

The second command needs neither `tokenizers` nor `jinja2`. Its prompts, answers and scores are those of a run that
makes its own prompts. Tokenizers must be byte-level, as those of SmolLM2, Qwen and Llama 3 are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.script import listed
from benchmarks.ruler.essay import Essay
from benchmarks.ruler.prompt import Made, Sample, tasks_named
from benchmarks.ruler.question import Task
from xsake._ground import atomic


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Samples by name, of one model, essay and seed; and what answers are decoded by."""

    model: str
    digest: str  # of the essay
    seed: int
    stop: frozenset[int]
    samples: Mapping[str, Mapping[str, Any]]  # by name, the fields of a `Sample` but for its score
    pieces: Sequence[bytes]  # of each token; of a token that is no text, nothing

    def check(self, tasks: Mapping[str, Task], lengths: Sequence[int], samples: int) -> None:
        wanted = [f"{name}/{length}/{n}" for name in tasks for length in lengths for n in range(samples)]
        if missing := [name for name in wanted if name not in self.samples]:
            raise ValueError(
                f"the prepared prompts lack {len(missing)} of {len(wanted)}, such as {missing[0]} "
                "(TASK/LENGTH/SAMPLE): ask for fewer, or prepare them"
            )

    def sample(self, name: str, task: Task, length: int, number: int) -> Sample:
        return Sample(score=task.score, **self.samples[f"{name}/{length}/{number}"])

    def decode(self, tokens: Iterable[int]) -> str:
        """As the tokenizer does: numbers that a model has beyond its tokenizer's are no text."""
        known = (self.pieces[token] for token in tokens if token < len(self.pieces))
        return b"".join(known).decode("utf-8", "replace")

    def save(self, path: Path) -> None:
        about = {"format": FORMAT, "model": self.model, "essay": self.digest, "seed": self.seed}
        samples = [{k: v for k, v in one.items() if k != "tokens"} for one in self.samples.values()]
        tokens = [np.asarray(one["tokens"], np.uint32) for one in self.samples.values()]
        arrays = {
            "about": json.dumps(about | {"stop": sorted(self.stop), "samples": samples}),
            "tokens": np.concatenate(tokens),
            "token_counts": [len(one) for one in tokens],
            "pieces": np.frombuffer(b"".join(self.pieces), np.uint8),
            "piece_sizes": np.array([len(piece) for piece in self.pieces], np.uint16),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Prepared:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            about = json.loads(str(arrays["about"]))
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}, not {FORMAT!r}")
            tokens = np.split(arrays["tokens"], np.cumsum(arrays["token_counts"])[:-1])
            whole, ends = arrays["pieces"].tobytes(), np.cumsum(arrays["piece_sizes"], dtype=np.int64).tolist()
            pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            samples = {
                one["name"]: one | {"tokens": found.tolist()}
                for one, found in zip(about["samples"], tokens, strict=True)
            }
        except (ValueError, KeyError, TypeError, EOFError) as error:
            raise ValueError(
                f"{path} holds no prepared prompts, or is damaged ({error!r}): python -m benchmarks.ruler.prepared"
            ) from error
        return cls(about["model"], about["essay"], about["seed"], frozenset(about["stop"]), samples, pieces)


FORMAT = "benchmarks.ruler.prepared 1"


def prepare(made: Made, model: str, tasks: Mapping[str, Task], lengths: Sequence[int], samples: int) -> Prepared:
    """Raises ValueError if the tokenizer is not byte-level: its answers could not be decoded without it."""
    pieces = _pieces(made.tokenizer)
    found = {}
    for length in lengths:
        for name, task in tasks.items():
            for number in range(samples):
                one = made.sample(name, task, length, number)
                found[one.name] = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "score"}
    ready = Prepared(model, made.essay.digest, made.seed, made.stop, found, pieces)
    for name, one in found.items():
        if ready.decode(one["tokens"]) != made.decode(one["tokens"]):
            raise ValueError(f"the tokenizer is not byte-level, or has rules of its own: {name} would be garbled")
    return ready


def _pieces(tokenizer: Any) -> list[bytes]:
    """The bytes of each token. Byte-level tokenizers write a byte that is no visible character of Latin-1 as one of the
    characters from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    core = tokenizer.core
    added = core.get_added_tokens_decoder()
    pieces = []
    for number in range(1 + max(core.get_vocab().values())):
        token = core.id_to_token(number) or ""
        if number in added:
            pieces.append(b"" if added[number].special else token.encode())
        else:
            if unknown := [character for character in token if character not in byte_of]:
                raise ValueError(f"the tokenizer is not byte-level: its token {token!r} holds {unknown[0]!r}")
            pieces.append(bytes(byte_of[character] for character in token))
    return pieces


def main() -> None:
    from xsake.model import load_tokenizer
    from xsake.model.weights.published import name_of

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ruler.prepared",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a published model, or a GGUF or safetensors file")
    parser.add_argument("--out", type=Path, required=True, help="the prompts (.npz)")
    parser.add_argument("--lengths", type=listed(int), default=[4096, 8192])
    parser.add_argument("--tasks", type=listed(), default=["all"])
    parser.add_argument("--samples", type=int, default=10, help="per task and length")
    parser.add_argument("--essay", type=Path, help="plain text for the haystack")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        tasks, lengths = tasks_named(args.tasks), args.lengths
        essay = Essay.python_reference() if args.essay is None else Essay.read(args.essay)
        made = Made(load_tokenizer(args.model), essay, args.seed)
        made.check(tasks, lengths, args.samples)
        prepare(made, name_of(args.model), tasks, lengths, args.samples).save(args.out)
    except (ValueError, OSError, NotImplementedError) as error:
        parser.error(str(error))
    print(f"{args.out}: {len(tasks) * len(lengths) * args.samples} prompts, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
