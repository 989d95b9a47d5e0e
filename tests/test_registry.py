"""Which backend serves where, and what is said about it."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

import xsake
from xsake import _op, _registry
from xsake.kernels_pallas_gpu import mosaic, triton


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that calls run on a GPU of the given compute capability."""

    def pretend(capability: str) -> None:
        monkeypatch.setattr(_op, "platform_of", lambda x: "gpu")
        for module in (mosaic, triton):
            monkeypatch.setattr(module, "compute_capability", lambda: capability)

    return pretend


def test_best_first():
    assert list(xsake.implementations()) == ["mosaic_gpu", "triton", "mosaic_tpu", "xla"]


@pytest.mark.parametrize(
    "capability, expected",
    [
        ("9.0", ["mosaic_gpu", "triton", "xla"]),
        ("8.0", ["triton", "xla"]),
        ("10.0", ["triton", "xla"]),
        ("7.5", ["xla"]),
    ],
)
def test_a_gpu_gets_the_best_that_it_can_run(gpu, capability, expected):
    gpu(capability)
    assert _registry.candidates(None, "gpu") == expected


def test_an_old_gpu_gets_xla_and_is_told_so_once(gpu, caplog):
    gpu("7.5")
    _registry._say_once.cache_clear()
    q = jnp.ones((1, 64, 1, 16))
    with caplog.at_level(logging.WARNING, logger="xsake"):
        xsake.attention(q, q, q)
        xsake.attention(q, q, q)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "plain XLA" in messages[0] and "7.5" in messages[0] and "triton" in messages[0]


def test_float32_on_hopper_goes_to_triton(gpu):
    gpu("9.0")

    def chosen(dtype):
        names = _registry.candidates(None, "gpu")
        from tests.test_mosaic_lowering import make_call

        return _registry.choose(names, make_call(dtype=dtype))

    assert chosen(jnp.bfloat16) == "mosaic_gpu"
    assert chosen(jnp.float32) == "triton"


def test_nothing_is_said_on_a_cpu(caplog):
    if jax.default_backend() != "cpu":
        pytest.skip("this process has an accelerator")
    q = jnp.ones((1, 64, 1, 16))
    with caplog.at_level(logging.WARNING, logger="xsake"):
        xsake.attention(q, q, q)
    assert not caplog.records
