"""SmolLM2: that a real model loads right is shown by how well it reads and writes."""

from __future__ import annotations

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import run

import xsake
from xsake.model import PRESETS, KVCache, generate, load_pretrained, load_tokenizer
from xsake.model.weights import fetch

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not fetch.place("smollm2").exists(), reason="fetch it first: xsake model fetch smollm2"),
    pytest.mark.xdist_group("pretrained"),
]


@pytest.fixture(scope="module")
def model():
    return load_pretrained("smollm2", dtype=jnp.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def documentation(tokenizer):
    """Python's language reference, which comes with Python."""
    return np.array(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))), np.int32)


def test_the_file_says_what_the_preset_says(model):
    assert model.config == PRESETS["smollm2-135m"]


def test_perplexity_on_python_documentation(model, documentation):
    @nnx.jit
    def surprise(model, tokens):
        logits = jax.nn.log_softmax(model(tokens)[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    starts = np.linspace(0, len(documentation) - 2048, 4, dtype=int)
    perplexity = np.exp(np.mean([surprise(model, documentation[None, i : i + 2048]) for i in starts]))
    assert 7.9 < perplexity < 12


def test_a_chat_is_sensible(model, tokenizer):
    questions = ["What is the capital of France?", "Which planet is known as the Red Planet?"]
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
    answers = generate(model, prompts, max_new_tokens=24, stop=tokenizer.stop)
    paris, mars = (tokenizer.decode(answer) for answer in answers)
    assert "Paris" in paris and "Mars" in mars


def test_sparse_attention_of_every_block_gives_the_same_logits(model, documentation):
    tokens = documentation[None, :256]
    mask = xsake.patterns.causal(256, 256, block_q=64, block_kv=64)
    np.testing.assert_allclose(run(model, tokens, mask_fn=lambda *_: mask), run(model, tokens), atol=2e-3)


def test_cached_logits_are_the_uncached_ones(model, documentation):
    tokens = documentation[None, :256]
    cache = KVCache.empty(model.config, batch=1, capacity=256, dtype=jnp.float32)
    start, cache = run(model, tokens[:, :253], cache=cache)
    parts = [start]
    for step in range(253, 256):
        logits, cache = run(model, tokens[:, step : step + 1], cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), run(model, tokens), atol=2e-3)
