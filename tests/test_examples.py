"""The scripts in examples/ do what they say."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import xsake

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_flax_model_trains():
    """Only with a mask that leaves blocks out; the slow test also trains with the other attentions."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = runpy.run_path(str(EXAMPLES / "flax_model.py"))
        window = xsake.patterns.sink_window(256, 256, sink=16, window=32, block_q=16, block_kv=16)
        losses = model["train"](1, 2, partial(model["attention_fn"], block_mask=window))
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_flax_model(capsys):
    """Flax's attention and ours train alike; a mask that leaves blocks out trains too."""
    # As users run it: optax mixes integers and floats, and the model adds places to tokens.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        flax, dense, sparse = runpy.run_path(str(EXAMPLES / "flax_model.py"))["main"](layers=1, steps=2).values()
    np.testing.assert_allclose(dense, flax, rtol=1e-4)
    assert abs(sparse[0] - flax[0]) < 0.2 and sparse != dense
    assert capsys.readouterr().out.count("loss") == 3
