"""A configuration changes how a call is computed, never what: tiles, search space, determinism."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from sweep import sweep

import xsake
from xsake.testing.case import check, make, run
from xsake.testing.checks import CHECKS, four_times, small, space_of

PARTS = 8  # of a search space: each in a process of its own, within the time of a test


@pytest.mark.slow  # test_predecessor_forward_tiles_differ_from_backward_tiles has the second
@pytest.mark.parametrize("which", [0, 1])
def test_forward_and_backward_tiles_are_independent(implementation, which):
    case = make(
        implementation, q_len=75, kv_len=107, mask=(2, 4), bias=(1, 0, 0, 0), sinks=(4,), mask_causal=True, density=0.8
    )
    config = implementation.configs(case)[which]
    check(case, run(implementation, case, config=config))


def test_search_space_holds_the_default_and_fits_the_call(implementation):
    space = space_of(implementation, small(implementation))
    assert len({hash(c) for c in space}) > 1


def test_configs_of_the_search_space_give_the_same_numbers(implementation):
    """The last configuration only: the default runs in every other test, and all configurations in the slow test."""
    CHECKS["configurations: the last of the search space"].run(implementation)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_config_of_the_search_space_gives_the_same_numbers(implementation, part):
    case = small(implementation)
    for config in space_of(implementation, case)[part::PARTS]:
        check(case, run(implementation, case, config=config))


def test_config_of_another_implementation_is_refused(implementation):
    x = jnp.ones((1, 8, 1, 8), implementation.dtypes[0])
    with (
        pytest.raises(
            TypeError, match=rf"config must be a .*Config for implementation '{implementation.name}'; got builtins.dict"
        ),
        implementation.context(),
    ):
        xsake.attention(x, x, x, implementation=implementation.name, config={})


def test_default_call_chooses_an_implementation(caplog, monkeypatch):
    monkeypatch.setenv("XSAKE_LOG", "info")
    x = jnp.ones((1, 8, 1, 8))
    with caplog.at_level("INFO", logger="xsake"):
        xsake.attention(x, x, x)
    assert any(repr(name) in caplog.text for name, reason in xsake.implementations().items() if reason is None)


@pytest.mark.parametrize("dtype", sweep(["float32", "bfloat16"], slow=["float32"]))
def test_two_backward_runs_give_the_same_bits(implementation, dtype):
    if dtype not in implementation.dtypes:
        pytest.skip(f"{implementation.name} does not claim {dtype}")
    case = make(implementation, dtype=dtype, bias=(1, 1, 0, 0), sinks=(4,), density=0.8)
    four_times(implementation, case)
