"""Documents packed into a sequence: each chooses its blocks as if it stood alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import hads
from xsake.hads.profile.by_length import forced_share, kept_by_length

BLOCK, LENGTH, BUDGET, LAYER = 16, 448, 0.6, 1
PROFILE = dataclasses.replace(
    case.random_profile(block=BLOCK), rule=dataclasses.replace(case.RULE, exact_queries=0, last_rows=2, last_weight=4.0)
)
EXACT = case.random_profile(block=BLOCK)
ENDS = {"aligned": (160, 320), "short": (160, 240), "anywhere": (9, 187, 300)}


def segments(ends: tuple[int, ...]) -> np.ndarray:
    return np.searchsorted(ends, np.arange(LENGTH), side="right").astype(np.int32)[None]


def program(profile: hads.HadsProfile) -> Any:
    @jax.jit
    def blocks(query: jax.Array, key: jax.Array, ids: jax.Array, layer: jax.Array) -> jax.Array:
        return hads.select(query, key, profile, BUDGET, layer=layer, segment_ids=ids, transpose=False).to_blocks()

    return blocks


@pytest.fixture(scope="module")
def inputs() -> tuple[np.ndarray, np.ndarray]:
    return case.random_inputs(0, LENGTH, PROFILE)


@pytest.fixture(scope="module")
def found(inputs: Any) -> dict[str, np.ndarray]:
    """One program for all documents: its segments are traced, and so is its layer."""
    run = program(PROFILE)
    return {name: np.asarray(run(*inputs, segments(ends), LAYER)) for name, ends in ENDS.items()}


def alone(inputs: Any, profile: hads.HadsProfile, begin: int, end: int) -> np.ndarray:
    query, key = (x[:, begin:end] for x in inputs)
    share = max(BUDGET, forced_share(profile.grid(end - begin)))
    return np.asarray(hads.select(query, key, profile, share, layer=LAYER, transpose=False).to_blocks())


def test_each_document_has_the_blocks_that_it_has_alone(inputs: Any, found: dict[str, np.ndarray]):
    wanted = np.zeros_like(found["aligned"])
    for begin, end in itertools.pairwise((0, *ENDS["aligned"], LENGTH)):
        at = slice(begin // BLOCK, end // BLOCK)
        wanted[..., at, at] = alone(inputs, PROFILE, begin, end)
    np.testing.assert_array_equal(found["aligned"], wanted)


def test_exact_rows_see_their_own_document(inputs: Any):
    blocks = np.asarray(program(EXACT)(*inputs, segments(ENDS["aligned"]), LAYER))
    at = slice(320 // BLOCK, None)
    np.testing.assert_array_equal(blocks[..., at, at], alone(inputs, EXACT, 320, LENGTH))


@pytest.mark.parametrize("name", ENDS)
def test_no_block_is_kept_that_no_token_can_use(name: str, found: dict[str, np.ndarray]):
    """Documents of any length keep the blocks of the budget, and none of those before the row's first document."""
    ids = segments(ENDS[name])[0]
    usable = (ids[:, None] == ids) & (np.arange(LENGTH)[:, None] >= np.arange(LENGTH))
    usable = usable.reshape(LENGTH // BLOCK, BLOCK, -1, BLOCK).any((1, 3))
    blocks = found[name][0]
    assert not (blocks & ~usable).any() and blocks.diagonal(axis1=1, axis2=2).all()
    kept, _ = kept_by_length(PROFILE, BUDGET, 1.0, LENGTH)
    begin = np.array([np.flatnonzero(ids == ids[row * BLOCK])[0] // BLOCK for row in range(len(usable))])
    for first in np.unique(begin):
        rows = np.flatnonzero(begin == first)
        count = kept[rows[-1] + 1 - first] - kept[rows[0] - first]
        assert blocks[:, rows].sum() == count[LAYER], name


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(segment_ids=np.zeros((1, 9), np.int32)), r"segment_ids of shape \(1, 9\) must be \[1, 448\]"),
        (dict(segment_ids=segments((9,)), mode="static"), 'packed documents have mode="exact"'),
        (dict(segment_ids=(segments((9,)),) * 2), "HADS takes those of a sequence, one array"),
        (dict(spare=2.0), "spare=2.0 is for packed documents"),
    ],
)
def test_wrong_arguments(inputs: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        hads.select(*map(jnp.asarray, inputs), PROFILE, BUDGET, layer=0, **options)
