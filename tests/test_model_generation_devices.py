"""Generation on 8 simulated devices: the tokens of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import hads_case as case
import jax
import pytest
from sweep import sweep
from tiny_model import FOUR_PROMPTS, TINY, build

import xsake
from xsake.model import HadsBudget, Transformer, generate
from xsake.model.generation.prefill import read_prompts
from xsake.model.network.sharding import make_mesh, shard_model

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")

PROFILE = case.random_profile(layers=1, head_dim=16)


def window(layer: int, query: Any, key: Any) -> xsake.BlockMask:
    return xsake.patterns.sink_window(query.shape[1], key.shape[1], sink=16, window=32, block_q=16, block_kv=16)


CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense in chunks": {"chunk": 64},
    "with masks": {"mask_fn": window},
    "HADS, then dense": {"hads": HadsBudget(PROFILE, 0.8, policy="always")},
    "HADS in chunks and in decode": {"hads": HadsBudget(PROFILE, 0.8, decode=0.7, policy="always"), "chunk": 64},
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(config=dataclasses.replace(TINY, layers=1))


@pytest.mark.parametrize("name", sweep(CALLS, slow=[name for name in CALLS if name != "HADS, then dense"]))
def test_eight_devices_write_the_tokens_of_one(model: Transformer, name: str):
    options = dict(max_new_tokens=3, **CALLS[name])
    wanted = generate(model, FOUR_PROMPTS, **options)
    assert generate(model, FOUR_PROMPTS, mesh=make_mesh(data=4, model=2), **options) == wanted


def test_cache_and_weights_are_split(model: Transformer):
    mesh = make_mesh(data=4, model=2)
    read = read_prompts(shard_model(model, mesh), FOUR_PROMPTS, capacity=192, mesh=mesh)
    shards = read.cache.keys[0].addressable_shards
    assert len(shards) == 8 and {shard.data.shape for shard in shards} == {(1, 192, 1, 16)}


def test_meshes_that_do_not_fit_are_refused(model: Transformer):
    with pytest.raises(ValueError, match="3 prompts cannot be divided over the mesh's data=4"):
        generate(model, FOUR_PROMPTS[:3], max_new_tokens=1, mesh=make_mesh(data=4, model=2))
    with pytest.raises(ValueError, match="generation does not cut sequences: sequence=2"):
        generate(model, FOUR_PROMPTS, max_new_tokens=1, mesh=make_mesh(sequence=2))
