"""What reading a prompt in chunks, and writing with some of the cache's blocks, cost in quality: KL against dense.

    python -m benchmarks.hads.chunk_quality TEXT ... --length 2048 --chunk 512 [--model smollm2] [--profile FILE]
        [--budgets 0.1,0.2,0.43] [--decode-budgets 0.1,0.2,0.4] [--new-tokens 64] [--sequences 4] [--record]

Reading: the divergence of the model's predictions after every token of a text, read with HADS in one piece and in
chunks, from those of dense attention. Writing: a text is read densely and continued greedily and densely; the same
tokens are then written with HADS, and every step's prediction is compared. Texts must not have calibrated the profile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import record
from benchmarks.hads.written import divergences
from xsake.hads import HadsProfile
from xsake.hads.profile.fingerprint import shared
from xsake.hads.profile.profile import shipped
from xsake.hads.study.divergence import compare
from xsake.hads.study.evaluation import MOST_SHARED
from xsake.hads.study.texts import Text, load_texts
from xsake.model import HadsBudget, Transformer, load_pretrained, load_tokenizer
from xsake.model.generation.prefill import Prompt, read_prompts
from xsake.model.weights.published import name_of


def read(model: Transformer, tokens: np.ndarray, *, room: int = 0, **options: Any) -> tuple[Array, Prompt]:
    """The final states [1, T, width] of a text, and what was read, with room for some more tokens."""
    states: list[Array] = []
    capacity = min(-(-(len(tokens) + room) // 64) * 64, model.config.context)
    done = read_prompts(model, [tokens.tolist()], capacity=capacity, watch=states.append, **options)
    return model.norm(jnp.concatenate(states, 1)[:, : len(tokens)]), done


def reading(
    model: Transformer, profile: HadsProfile, text: Text, dense: Array, budgets: list[float], chunks: list[int]
) -> list[dict[str, Any]]:
    """KL and perplexity of a text that is read in one piece and in chunks, at each budget."""
    tokens, found = jnp.asarray(text.tokens)[None], []
    for budget in budgets:
        for chunk in (None, *chunks):
            states, _ = read(model, text.tokens, hads=HadsBudget(profile, budget), chunk=chunk)
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


def writing(
    model: Transformer, profile: HadsProfile, done: Prompt, budgets: list[float], new: int
) -> list[dict[str, Any]]:
    """KL of each budget's predictions from dense ones, over `new` tokens that dense attention writes."""
    return [
        {"budget": budget, "new_tokens": new, "kl": float(seen.kl.mean()), "same_token": float(seen.same.mean())}
        for budget, seen in divergences(model, profile, done, budgets, new).items()
    ]


def summarise(texts: list[dict[str, Any]], chunks: list[int]) -> dict[str, Any]:
    """Means over the texts, and the KL of reading in chunks over that of reading in one piece."""
    lines, written = [], []
    for at, line in enumerate(texts[0]["reading"]):
        kls = np.array([text["reading"][at]["kl"] for text in texts])
        whole = np.array([text["reading"][at - at % (1 + len(chunks))]["kl"] for text in texts])
        gaps = [text["reading"][at]["loss"] - text["reading"][at]["dense_loss"] for text in texts]
        lines.append(
            {name: line[name] for name in ("budget", "chunk")}
            | {"kl": kls.mean(), "of_one_piece": kls.mean() / whole.mean(), "perplexity_gap": np.expm1(np.mean(gaps))}
            | {"of_one_piece_per_text": (kls / whole).tolist()}
        )
    for at, line in enumerate(texts[0]["writing"]):
        means = {name: np.mean([text["writing"][at][name] for text in texts]) for name in ("kl", "same_token")}
        written.append({"budget": line["budget"], "new_tokens": line["new_tokens"], **means})
    return {"reading": lines, "writing": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="plain text, or .npz files of tokens [N, T] by domain")
    parser.add_argument("--model", default="smollm2", help="a published model, or a GGUF or safetensors file")
    parser.add_argument("--profile", type=Path, help="by default the one that comes with xsake")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--chunk", default="512", help="tokens per chunk; several, comma-separated")
    parser.add_argument("--budgets", default="0.1,0.2,0.43")
    parser.add_argument("--decode-budgets", default="0.1,0.2,0.4")
    parser.add_argument("--new-tokens", type=int, default=64, help="0 to read only")
    parser.add_argument("--sequences", type=int, default=4, help="per domain")
    parser.add_argument("--domains", help="only these, comma-separated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/hads/chunks-MODEL-LENGTH.json")
    parser.add_argument("--out", type=Path, help="write that file to another folder")
    given = parser.parse_args()
    model_name = name_of(given.model)
    budgets, decode = ([float(x) for x in text.split(",")] for text in (given.budgets, given.decode_budgets))
    chunks = [int(x) for x in given.chunk.split(",")]
    dtype = jnp.dtype(given.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    path = given.profile
    profile = shipped(model_name, given.length) if path is None else HadsProfile.load(path)
    encode = load_tokenizer(given.model).encode if any(path.suffix != ".npz" for path in given.texts) else None
    options = dict(length=given.length, limit=given.sequences, encode=encode)
    texts = load_texts(given.texts, domains=given.domains and given.domains.split(","), **options)
    if known := [text.name for text in texts if shared(text.tokens, profile.digests) > MOST_SHARED]:
        raise SystemExit(f"the profile was calibrated on {known}: evaluate on other texts")
    model = load_pretrained(given.model, dtype=dtype, param_dtype=dtype)
    measured = []
    for text in texts:
        dense, done = read(model, text.tokens, room=given.new_tokens + 1)
        line: dict[str, Any] = {"text": text.name, "reading": reading(model, profile, text, dense, budgets, chunks)}
        line["writing"] = []
        if given.new_tokens:
            line["writing"] = writing(model, profile, done, decode, given.new_tokens)
        measured.append(line)
        print(line, flush=True)
    results = summarise(measured, chunks)
    for row in results["reading"]:
        how = "one piece" if row["chunk"] is None else f"chunks of {row['chunk']}"
        print(
            f"read at {row['budget']:5.0%} in {how:15}: KL {row['kl']:.5f}, {row['of_one_piece']:.3f} of one piece, "
            f"perplexity {row['perplexity_gap']:+.2%}"
        )
    for row in results["writing"]:
        print(
            f"written at {row['budget']:5.0%}: KL {row['kl']:.5f} over {row['new_tokens']} tokens, "
            f"{row['same_token']:.1%} the same token"
        )
    if where := record.RESULTS / "hads" if given.record else given.out:
        settings = {"model": model_name, "length": given.length, "dtype": dtype.name, "profile": repr(profile)}
        name = f"chunks-{model_name}-{given.length}"
        print(record.save(name, results | {"texts": measured}, where, settings=settings))


if __name__ == "__main__":
    main()
