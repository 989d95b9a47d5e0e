"""The perplexity of SmolLM2 as loaded here, which shows that weights, rotary positions and tokenizer are right.

python -m benchmarks.smollm2 [--record]        after `xsake model fetch smollm2`; some minutes on a CPU
"""

from __future__ import annotations

from pydoc_data.topics import topics  # Python's language reference, which comes with Python

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import xsake
from benchmarks import record
from benchmarks.harness.script import parser
from xsake.model import Transformer, load_pretrained, load_tokenizer

LENGTH, WINDOWS = 2048, 12


@nnx.jit
def measure(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean loss of a window in nats per token, and the largest change of a logit by a mask that lists every block."""
    mask = xsake.patterns.causal(LENGTH, LENGTH, block_q=64, block_kv=64)
    dense, sparse = model(tokens), model(tokens, mask_fn=lambda *_: mask)
    chosen = jnp.take_along_axis(dense[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    surprise = jax.nn.logsumexp(dense[:, :-1], -1) - chosen
    return surprise.mean(), jnp.abs(dense - sparse).max()


def main() -> None:
    out = parser(__doc__).parse_args().out
    model, tokenizer = load_pretrained("smollm2", dtype=jnp.float32), load_tokenizer("smollm2")
    text = np.array(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))), np.int32)
    windows = []
    for start in np.linspace(0, len(text) - LENGTH, WINDOWS, dtype=int).tolist():
        surprise, difference = map(float, measure(model, jnp.asarray(text[None, start : start + LENGTH])))
        windows.append({"start": start, "perplexity": float(np.exp(surprise)), "sparse_difference": difference})
        print(windows[-1], flush=True)
    results = {
        "model": "smollm2",
        "text": "pydoc_data.topics",
        "length": LENGTH,
        "dtype": "float32",
        "perplexity": float(np.exp(np.mean([np.log(w["perplexity"]) for w in windows]))),
        "windows": windows,
    }
    print(f"perplexity {results['perplexity']:.2f} over {WINDOWS} windows of {LENGTH} tokens")
    if out is not None:
        print(record.save("smollm2", results, out))


if __name__ == "__main__":
    main()
