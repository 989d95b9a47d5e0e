"""Families whose numbers transformers wrote down: logits, and continuations that read the cache."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_model import run
from transformers_models import LENGTH, NEW, PLACES, RECORD, RECORDED, TOKENS, scales_begin_at, weight

from xsake.model import generate, load_pretrained, save_pretrained

TOLERANCE = 2e-4  # of the largest logit, as in parity_transformers.py


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_continuations_are_those_of_transformers(tmp_path, name):
    case = json.loads(RECORD.read_text())["cases"][name]
    begin = scales_begin_at(case["config"]["model_type"])
    save_file(
        {name: weight(name, tuple(shape), begin) for name, shape in case["tensors"].items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    model = load_pretrained(tmp_path, dtype=jnp.float32)
    logits = run(model, TOKENS)
    atol = TOLERANCE * case["largest"] + 1e-5  # five decimals are recorded
    np.testing.assert_allclose(logits[:, PLACES, ::8], case["logits"], rtol=0, atol=atol)
    if name == "Gemma 3":  # layers of two kinds read one cache
        assert model.config.context > LENGTH + NEW
        assert generate(model, TOKENS.tolist(), max_new_tokens=NEW) == case["continued"]
    save_pretrained(model, tmp_path / "again")
    again = load_pretrained(tmp_path / "again", dtype=jnp.float32)
    assert again.config == model.config
