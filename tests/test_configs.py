"""A configuration changes how a call is computed, never what: tiles, search space, determinism."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from sweep import sweep

import xsake
from xsake._op.arguments import build_call
from xsake._op.registry import get
from xsake.testing.case import check, make, run
from xsake.testing.reference import Results

PARTS = 8  # of a search space: each in a process of its own, within the time of a test


@pytest.mark.slow  # test_predecessor_forward_tiles_differ_from_backward_tiles has the second
@pytest.mark.parametrize("which", [0, 1])
def test_forward_and_backward_tiles_are_independent(implementation, which):
    case = make(
        implementation, q_len=75, kv_len=107, mask=(2, 4), bias=(1, 0, 0, 0), sinks=(4,), mask_causal=True, density=0.8
    )
    config = implementation.configs(case)[which]
    check(case, run(implementation, case, config=config))


def _call(implementation, case):
    sizes = case.query.shape[1], case.key.shape[1], case.query.shape[3]
    blocks = get(implementation.name).default_blocks(*sizes)
    return build_call(**case.inputs, **case.rest, **case.options, mask=case.mask(), default_blocks=blocks)


def _space(implementation, case):
    backend, call = get(implementation.name), _call(implementation, case)
    return list(backend.search_space(call)), backend.default_config(call)


def _small(implementation):
    return make(implementation, q_len=75, batch=1, q_heads=2, kv_heads=1, mask=(1, 2), mask_causal=True, density=0.8)


def test_search_space_holds_the_default_and_fits_the_call(implementation):
    case = _small(implementation)
    space, default = _space(implementation, case)
    assert default in space
    assert all(isinstance(c, get(implementation.name).Config) for c in space)
    assert len({hash(c) for c in space}) > 1
    call = _call(implementation, case)
    with implementation.context():
        assert [get(implementation.name).misfit(call, c) for c in space] == [None] * len(space)


def test_configs_of_the_search_space_give_the_same_numbers(implementation):
    """The last configuration only: the default runs in every other test, and all configurations in the slow test."""
    case = _small(implementation)
    space, _ = _space(implementation, case)
    check(case, run(implementation, case, config=space[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_config_of_the_search_space_gives_the_same_numbers(implementation, part):
    case = _small(implementation)
    for config in list(dict.fromkeys(_space(implementation, case)[0]))[part::PARTS]:
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
    first, *others = (run(implementation, case) for _ in range(4))
    for name, *found in zip(Results._fields, first, *others, strict=True):
        assert len({x.tobytes() for x in found}) == 1, f"{name} differs between runs"
