"""What calls outside `jax.jit` compile for every new length, and how much of it a process keeps."""

from __future__ import annotations

import gc
from collections import Counter
from functools import lru_cache

import hads_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import hads
from xsake._ground import programs


def attend(length):
    q = jnp.ones((1, length, 2, 8))
    mask = xsake.BlockMask.full(length, length, block_q=16, block_kv=16)
    return xsake.attention(q, q, q, mask)


def differentiate(length):
    q = jnp.ones((1, length, 2, 8))
    return jax.grad(lambda q: xsake.attention(q, q, q, is_causal=True).sum())(q)


def vmapped(length):
    return jax.vmap(lambda q: xsake.attention(q, q, q))(jnp.ones((2, 1, length, 2, 8)))


def read_pages(length):
    pages = jnp.ones((10, 16, 2, 8))
    return xsake.attention(jnp.ones((1, 1, 2, 8)), pages, pages, page_table=np.arange(length // 16)[None])


def over_devices(length):
    q = jnp.ones((1, length, 2, 8))
    mesh = jax.make_mesh((2,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    return xsake.sharded_attention(q, q, q, sequence="s", mesh=mesh)


def choose_blocks(length):
    q, k = jnp.ones((1, length, 4, 8)), jnp.ones((1, length, 2, 8))
    return hads.select(q, k, hads_case.random_profile(), 0.97, layer=0).kv_indices


@pytest.fixture
def two_programs(monkeypatch):
    kept = lru_cache(maxsize=2)(programs.program.__wrapped__)
    monkeypatch.setattr(programs, "program", kept)
    return kept


@pytest.fixture(autouse=True)
def _older_objects_are_left_alone():
    """Collecting those of all tests before takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


def live() -> set:
    gc.collect()
    return set(jax.devices()[0].client.live_executables())


def names_of(executables: set) -> Counter[str]:
    return Counter(program.hlo_modules()[0].name for program in executables)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (attend, {"jit_mappable_forward"}),
        (differentiate, {"jit_mappable_forward", "jit_gradients"}),
        (vmapped, {"jit_mappable_forward"}),
        (read_pages, {"jit_mappable"}),
        (over_devices, {"jit_program"}),
        (choose_blocks, {"jit_blocks"}),
    ],
)
def test_only_the_newest_programs_are_kept(call, names, two_programs):
    before = live()
    for length in (96, 128, 160):
        jax.block_until_ready(call(length))
    after = live()
    made = names_of(after - before)
    assert sum(made[name] for name in names) <= 2
    compiled = two_programs.cache_info().misses
    jax.block_until_ready(call(160))
    assert two_programs.cache_info().misses == compiled
    assert not live() - after
