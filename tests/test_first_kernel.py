"""The Hopper forward to learn from, against float64: interpreted with its races looked for, and on a Hopper GPU."""

from __future__ import annotations

import io
import types
from functools import cache

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from rich.console import Console
from targets import TARGETS

import xsake
from tests import try_kernel
from tests.cuda_offline import lower
from tests.kernels import KERNELS
from tests.test_import_direction import graph
from xsake.kernels_pallas_gpu.hopper import first
from xsake.testing.case import check, make
from xsake.testing.reference import Results

TARGET = next(target for target in TARGETS if target.name == "mosaic_gpu")
SHAPES = {
    "D 64, a list per query head": dict(head_dim=64, block_kv=64, mask=(1, 2), kv_heads=1),
    "D 128, block 64 x 128, a list per batch entry, causal": dict(
        head_dim=128, block_kv=128, mask=(2, 1), kv_heads=2, batch=2, q_len=70, dtype="float16", mask_causal=True
    ),
}


def case_of(*, block_kv, q_len=100, kv_len=330, **arguments):
    """Odd lengths, and enough blocks of keys to go round the ring twice. Row 0 of the first list is empty."""
    arguments["value_dim"] = arguments["head_dim"]
    sizes = dict(q_len=q_len, kv_len=kv_len, exact_lengths=True, block_q=64 // TARGET.unit)
    case = make(TARGET, **(dict(batch=1, q_heads=2) | sizes | arguments), block_kv=block_kv // TARGET.unit)
    case.blocks[0, 0, 0] = False
    return case


@cache
def compiled(interpret):
    def run(q, k, v, mask):
        return first.forward(q, k, v, mask, scale=q.shape[-1] ** -0.5, interpret=interpret)

    return jax.jit(run)


def check_forward(case, interpret):
    out, lse = compiled(interpret)(case.query, case.key, case.value, case.mask_with_room())
    check(case, Results(np.asarray(out), np.asarray(lse).swapaxes(1, 2)))
    empty = ~case.blocks[0, 0, 0].any()
    assert empty and np.isneginf(lse[0, 0, :64]).all() and not np.asarray(out)[0, :64, 0].any()


@pytest.mark.parametrize("name", SHAPES)
@hypothesis.settings(max_examples=3)
@hypothesis.given(seed=st.integers(0, 999), density=st.sampled_from([0.0, 0.2, 0.6, 1.0]))
def test_any_lists(name, seed, density):
    """One program per shape: the lists are arrays."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check_forward(case_of(**SHAPES[name], seed=seed, density=density), interpret)


def test_the_edit_of_the_page_is_a_race(monkeypatch):
    """A slot that is freed too early, as docs/write_a_kernel.md does it; `make kernel` says so."""
    page = pages.ROOT / "docs" / "write_a_kernel.md"
    ((path, text),) = pages.edited(page).items()
    edited = types.ModuleType("edited")
    exec(compile(text, path, "exec"), edited.__dict__)
    monkeypatch.setattr(first, "forward", edited.forward)
    console = Console(file=io.StringIO())
    assert try_kernel.wrong_calls(KERNELS["first"], console) == 1
    said = console.file.getvalue()
    assert (
        "more blocks than slots ... WRONG: RACE DETECTED" in said
        and "_memory_warpgroup" in said
        and "clock" not in said
    )


@pytest.mark.parametrize("name", SHAPES)
def test_it_lowers_for_hopper(name):
    case = case_of(**SHAPES[name])
    assert "first_forward" in lower(compiled(False), case.query, case.key, case.value, case.mask())


@pytest.mark.gpu
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("density", [0.1, 0.8])
@pytest.mark.parametrize("mask_causal", [False, True])
def test_any_lists_on_hopper(mask_causal, density, head_dim, block_kv):
    sizes = dict(batch=2, q_heads=8, kv_heads=2, mask=(1, 8), q_len=1000, kv_len=1531)
    case = case_of(head_dim=head_dim, block_kv=block_kv, density=density, mask_causal=mask_causal, **sizes)
    check_forward(case, False)


@pytest.mark.parametrize("changed", [dict(block_q=128), dict(local_window_size=(64, 0)), dict(dtype=jnp.float32)])
def test_a_call_that_it_does_not_know_is_refused(changed):
    given = dict(block_q=64, block_kv=64, dtype=jnp.bfloat16) | changed
    x = jnp.zeros((1, 128, 1, 64), given.pop("dtype"))
    with pytest.raises(AssertionError):
        first.forward(x, x, x, xsake.BlockMask.full(128, 128, **given), scale=1.0)


def test_no_module_imports_it():
    assert [name for name, imported in graph().items() if first.__name__ in imported] == []
