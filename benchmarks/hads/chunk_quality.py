"""What reading a prompt in chunks costs in quality: the divergence from dense attention.

    python -m benchmarks.hads.chunk_quality TEXT ... --length 2048 --chunk 512 [--model smollm2] [--profile FILE]
        [--budgets 0.1,0.2,0.43] [--sequences 4] [--record]

The divergence of the model's predictions after every token of a text, read with HADS in one piece and in chunks, from
those of dense attention. Texts must not have calibrated the profile. `benchmarks.gpu.generate` measures writing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import record
from benchmarks.harness.models import load, own_profile, unseen
from benchmarks.harness.script import Row, listed, parser
from xsake.hads import HadsProfile
from xsake.hads.study.divergence import compare
from xsake.hads.study.texts import Text, load_texts
from xsake.model import HadsBudget, Transformer, load_tokenizer
from xsake.model.generation.prefill import read_prompts
from xsake.model.weights.published import name_of


def read(model: Transformer, tokens: np.ndarray, **options: Any) -> Array:
    """The final states [1, T, width] of a text."""
    states: list[Array] = []
    capacity = min(-(-(len(tokens) + 1) // 64) * 64, model.config.context)
    read_prompts(model, [tokens.tolist()], capacity=capacity, watch=states.append, **options)
    return model.norm(jnp.concatenate(states, 1)[:, : len(tokens)])


def reading(model: Transformer, profile: HadsProfile, text: Text, budgets: list[float], chunks: list[int]) -> list[Row]:
    """KL and perplexity of a text that is read in one piece and in chunks, at each budget."""
    dense, tokens, found = read(model, text.tokens), jnp.asarray(text.tokens)[None], []
    for budget in budgets:
        for chunk in (None, *chunks):
            states = read(model, text.tokens, hads=HadsBudget(profile, budget), chunk=chunk)
            seen = compare(model, dense, states, tokens)
            found.append(
                {
                    "budget": budget,
                    "chunk": chunk,
                    "kl": float(seen.divergence.mean()),
                    "loss": float(seen.other_loss.sum() / (tokens.size - 1)),
                    "dense_loss": float(seen.loss.sum() / (tokens.size - 1)),
                }
            )
    return found


def summarise(texts: list[Row], chunks: list[int]) -> list[Row]:
    """Means over the texts, and the KL of reading in chunks over that of reading in one piece."""
    lines = []
    for at, line in enumerate(texts[0]["reading"]):
        kls = np.array([text["reading"][at]["kl"] for text in texts])
        whole = np.array([text["reading"][at - at % (1 + len(chunks))]["kl"] for text in texts])
        gaps = [text["reading"][at]["loss"] - text["reading"][at]["dense_loss"] for text in texts]
        lines.append(
            {name: line[name] for name in ("budget", "chunk")}
            | {"kl": kls.mean(), "of_one_piece": kls.mean() / whole.mean(), "perplexity_gap": np.expm1(np.mean(gaps))}
            | {"of_one_piece_per_text": (kls / whole).tolist()}
        )
    return lines


def main() -> None:
    options = parser(__doc__)
    options.add_argument("texts", nargs="+", type=Path, help="plain text, or .npz files of tokens [N, T] by domain")
    options.add_argument("--model", default="smollm2", help="a published model, or a GGUF or safetensors file")
    options.add_argument("--profile", type=Path, help="by default the one that comes with xsake")
    options.add_argument("--length", type=int, default=2048)
    options.add_argument("--chunk", type=listed(int), default=[512], help="tokens per chunk")
    options.add_argument("--budgets", type=listed(float), default=[0.1, 0.2, 0.43])
    options.add_argument("--sequences", type=int, default=4, help="per domain")
    options.add_argument("--domains", type=listed(), help="only these")
    options.add_argument("--dtype", choices=("float32", "bfloat16"))
    args = options.parse_args()
    name = name_of(args.model)
    profile = own_profile(name, args.length, args.profile)
    encode = load_tokenizer(args.model).encode if any(path.suffix != ".npz" for path in args.texts) else None
    sizes = dict(length=args.length, limit=args.sequences, encode=encode)
    texts = unseen(load_texts(args.texts, domains=args.domains, **sizes), profile)
    model = load(args.model, args.dtype)
    measured: list[Row] = []
    for text in texts:
        measured.append({"text": text.name, "reading": reading(model, profile, text, args.budgets, args.chunk)})
        print(measured[-1], flush=True)
    results = summarise(measured, args.chunk)
    for row in results:
        how = "one piece" if row["chunk"] is None else f"chunks of {row['chunk']}"
        told = f"KL {row['kl']:.5f}, {row['of_one_piece']:.3f} of one piece, perplexity {row['perplexity_gap']:+.2%}"
        print(f"read at {row['budget']:5.0%} in {how:15}: {told}")
    if args.out is not None:
        out = args.out / "hads" if args.out == record.RESULTS else args.out
        settings = {"model": name, "length": args.length, "dtype": str(np.dtype(model.dtype)), "profile": repr(profile)}
        found = {"reading": results, "texts": measured}
        print(record.save(f"chunks-{name}-{args.length}", found, out, settings=settings))


if __name__ == "__main__":
    main()
