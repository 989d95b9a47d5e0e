"""What a run is made of, checked: configuration, optimiser, attention, utilisation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.model.network.config import PRESETS
from xsake.model.training.attention import ATTENTION, NEAR, attention_of, fixed_pattern, with_block
from xsake.model.training.config import TrainConfig
from xsake.model.training.distributed import initialize
from xsake.model.training.optimizer import learning_rate, make_optimizer
from xsake.model.training.watch.mfu import peak_flops, utilisation

LONG = dataclasses.replace(PRESETS["tiny"], context=8192)
CONFIG = TrainConfig(model=PRESETS["tiny"], length=64, batch=4, steps=50, warmup=10)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"length": 513}, "length=513 is beyond the model's context of 512"),
        ({"length": 0}, "length=0 must be an int of at least 1"),
        ({"batch": 2.5}, r"batch=2.5 must be an int"),
        ({"steps": True}, "steps=True must be an int"),
        ({"microbatches": 3}, "batch=4 must be divisible by microbatches=3"),
        ({"warmup": 51}, "warmup=51 must be at most steps=50"),
        ({"warmup": -1}, "warmup=-1 must be an int of at least 0"),
        ({"learning_rate": 0}, "learning_rate=0 must be a finite number, above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"beta2": 1.0}, "beta2=1.0 must be a finite number, at least 0 and below 1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"final_fraction": 1.1}, "final_fraction=1.1 must be a finite number, at least 0 and at most 1"),
        ({"density": 0.0}, "density=0.0 must be a finite number, above 0 and at most 1"),
        ({"dtype": "float16"}, "dtype='float16' must be one of bfloat16, float32"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_wrong_configurations(change, message, unchecked_annotations):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_json_round_trip():
    assert TrainConfig.from_json(CONFIG.to_json()) == CONFIG


def test_the_learning_rate_rises_then_falls_as_a_cosine():
    rate = [float(learning_rate(CONFIG)(step)) for step in range(51)]
    np.testing.assert_allclose(rate[0], 1e-3 / 10, rtol=1e-5)
    np.testing.assert_allclose([rate[10], rate[30], rate[50]], [1e-3, 0.55e-3, 1e-4], rtol=1e-4)
    assert all(np.diff(rate[:11]) > 0) and all(np.diff(rate[10:]) < 0)
    at_once = dataclasses.replace(CONFIG, warmup=0)
    np.testing.assert_allclose(float(learning_rate(at_once)(0)), 1e-3, rtol=1e-5)
    only_warmup = dataclasses.replace(CONFIG, warmup=50)
    assert np.isfinite([float(learning_rate(only_warmup)(step)) for step in range(51)]).all()


def test_decay_is_on_matrices_only_and_gradients_are_clipped():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, warmup=0, weight_decay=0.5))
    params = {"norm": jnp.ones(4), "matrix": jnp.ones((4, 4))}
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zero, state, params)
        # Clipped to norm 1, gradients of any size look the same.
        once, twice = (
            optimizer.update(jax.tree.map(lambda x, scale=scale: scale * jnp.ones_like(x), params), state, params)[1]
            for scale in (10.0, 1000.0)
        )
    assert not np.any(updates["norm"])
    np.testing.assert_allclose(updates["matrix"], -1e-3 * 0.5, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), once, twice)


@pytest.mark.parametrize("name", ["sink_window", "sliding_window", "big_bird", "random"])
@pytest.mark.parametrize("density", [0.2, 0.43, 0.8, 1.0])
def test_patterns_have_the_density_asked_for(name, density):
    """The error is at most half of what one more block per row changes; 100% is all that causality allows."""
    mask = fixed_pattern(name, length=2048, block=64, density=density)
    assert abs(float(mask.density()) - density) < 0.5 / 16
    assert mask.is_causal and (density < 1 or mask.density() == 1)


def test_blocks_follow_the_density_and_the_length():
    for attention, length, density, block in [
        ("sink_window", 4096, 0.43, 128),
        ("sink_window", 1024, 0.1, 32),
        ("sink_window", 512, 0.1, 16),
        ("sink_window", 256, 0.43, 32),
        ("random", 512, 0.1, 32),
        ("hads", 512, 0.5, 32),
        ("dense", 512, 1.0, 128),
    ]:
        config = dataclasses.replace(CONFIG, attention=attention, length=length, density=density, model=LONG)
        found = with_block(config)
        assert found == dataclasses.replace(config, block=block), (attention, length, density, found.block)
        assert abs(attention_of(found)[2] - density) <= NEAR * density
    rows = fixed_pattern("random", length=512, block=128, density=0.1).to_blocks()
    assert rows[0, 0].any(-1).all(), "no row of blocks is empty"


def test_attention_by_name():
    for name in ATTENTION:
        density = 1.0 if name in ("dense", "cudnn") else 0.43
        config = dataclasses.replace(CONFIG, attention=name, density=density, length=512, block=16)
        _, mask_fn, found = attention_of(config)
        assert (mask_fn is None) == (name in ("dense", "cudnn", "hads"))
        assert abs(found - density) < 0.05
    with pytest.raises(ValueError, match="attention='window' must be one of dense, cudnn, hads, random"):
        attention_of(dataclasses.replace(CONFIG, attention="window"))
    with pytest.raises(ValueError, match=r"is dense: density=0.5 must be 1"):
        attention_of(dataclasses.replace(CONFIG, density=0.5))


def test_utilisation_only_where_the_peak_is_known():
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None and utilisation(1e9, 1e5, "cpu", 1) is None
    assert utilisation(1e9, 989e3, "NVIDIA H200", 2) == pytest.approx(0.5)


def test_joining_other_processes_takes_all_or_nothing():
    with pytest.raises(ValueError, match="missing: processes, process"):
        initialize("localhost:1234", None, None)
    with pytest.raises(ValueError, match="process=2 must be from 0 to 1 with processes=2"):
        initialize("localhost:1234", 2, 2)
