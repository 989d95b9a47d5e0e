"""Gemma 3 270M: its own weights and tokenizer give transformers' numbers."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import run
from transformers_models import GEMMA_RECORD, NEW, gemma_tokens

from xsake.model import generate, load_pretrained, load_tokenizer
from xsake.model.weights import fetch

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not fetch.place("gemma3-270m").exists(), reason="fetch it first: xsake model fetch gemma3-270m"),
]


def test_texts_logits_and_a_continuation_are_those_of_transformers():
    wanted = json.loads(GEMMA_RECORD.read_text())
    tokenizer, model = load_tokenizer("gemma3-270m"), load_pretrained("gemma3-270m", dtype=jnp.float32)
    for text, tokens in wanted["texts"].items():
        assert tokenizer.encode(text) == tokens and tokenizer.decode(tokens) == text
    logits = np.asarray(run(model, gemma_tokens(model.config.vocab_size))[0, ::50])
    np.testing.assert_allclose(logits[:, ::8192], wanted["logits"], rtol=0, atol=5e-3)
    assert logits.argmax(-1).tolist() == wanted["likeliest"]
    first = next(iter(wanted["texts"].values()))
    assert generate(model, [first], max_new_tokens=NEW) == [wanted["continued"]]
