"""A projection of one row as one of several, as on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.model.network import linear


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_is_multiplied_as_one_of_several(monkeypatch: pytest.MonkeyPatch, bias: bool):
    layer = linear.Linear(24, 40, use_bias=bias, rngs=nnx.Rngs(0))
    if bias:
        layer.bias[...] = jax.random.normal(jax.random.key(1), (40,))
    x = jax.random.normal(jax.random.key(2), (1, 1, 24))
    wanted = layer(x)
    monkeypatch.setattr(linear, "platform_of", lambda x: "gpu")
    assert "pad[" in str(jax.make_jaxpr(layer)(x)) and "pad[" not in str(jax.make_jaxpr(layer)(jnp.tile(x, (2, 1, 1))))
    found = layer(x)
    assert found.shape == (1, 1, 40)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
