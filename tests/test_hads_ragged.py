"""HADS for requests in one array: each chooses what its chunk chooses alone, wherever the chunk begins and ends."""

from __future__ import annotations

import dataclasses

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import hads
from xsake.hads.attention import ragged
from xsake.hads.attention.policy import ALWAYS, AUTO

PROFILE = case.random_profile()
BLOCK, BUDGET, PAGE, PAGES, LAYER = PROFILE.block, 0.8, 16, 8, 1
LENGTHS = [121, 86, 128]


def counts(start, end, length, budget=BUDGET, policy=ALWAYS):
    here = dict(device="cpu", dtype="float32")
    return ragged.counts_of_chunk(PROFILE, budget, policy, start=start, end=end, length=length, **here)


def test_counts_of_chunks_sum_to_those_of_the_prompt():
    whole = hads.layer_counts(PROFILE, BUDGET, 121)
    np.testing.assert_array_equal(counts(0, 121, 121), whole)
    np.testing.assert_array_equal(sum(counts(*span, 121) for span in ((0, 48), (48, 112), (112, 121))), whole)
    kept = hads.chunk_counts(PROFILE, BUDGET, [121], 64)
    np.testing.assert_array_equal(counts(64, 121, 121), kept[1, :, 0])


def test_the_policy_decides_by_the_prompt():
    policy = dataclasses.replace(ALWAYS, prompt=128)
    assert (counts(0, 64, 127, policy=policy) == ragged.DENSE).all()
    assert (counts(0, 64, 128, policy=policy) > 0).all()


def test_by_default_requests_are_dense():
    assert (counts(0, 64, 1 << 17, policy=AUTO) == ragged.DENSE).all()


@pytest.fixture(scope="module")
def arrays():
    """(queries, keys, values, page table) of the requests."""
    rng = np.random.default_rng(0)
    found = [[rng.standard_normal((n, heads, 8)).astype(np.float32) for n in LENGTHS] for heads in (4, 2, 2)]
    return *found, rng.permutation(len(LENGTHS) * PAGES).reshape(-1, PAGES).astype(np.int32)


@pytest.fixture(scope="module")
def attend():
    return jax.jit(lambda *arrays, **numbers: ragged.attend(PROFILE, LAYER, *arrays, **numbers))


def alone(arrays, b, start, end):
    query, key, value = (jnp.asarray(x[b][None]) for x in arrays[:3])
    length = jnp.array([LENGTHS[b]], jnp.int32)
    pooled = hads.PooledKeys.empty(batch=1, kv_heads=2, blocks=PAGES, head_dim=8)
    pooled = pooled.write(key[:, :end], length, start=0, block=BLOCK)
    count, weights = counts(start, end, LENGTHS[b])[LAYER], hads.LayerWeights.of(PROFILE, LAYER)
    options = dict(start=start, block=BLOCK, rule=PROFILE.rule)
    mask = hads.select_chunk(
        query[:, start:end], key[:, :end], pooled, weights, np.array([count], np.int32), length, **options
    )
    return xsake.attention(query[:, start:end], key[:, :end], value[:, :end], mask)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spans", [[(0, 121), (0, 86), (0, 0)], [(64, 121), (0, 64), (0, 128)], [(0, 64), (64, 86), (64, 128)]]
)
def test_each_request_chooses_as_its_chunk_does(arrays, attend, spans):
    queries, keys, values, table = arrays
    pages = np.full((len(LENGTHS) * PAGES, PAGE, 4, 16), np.nan, np.float32)
    pages[..., 8:] = 0
    query, cu = np.full((256, 4, 8), np.nan, np.float32), [0]
    for b, (start, end) in enumerate(spans):
        for t in range(end):
            pages[table[b, t // PAGE], t % PAGE, :, :8] = np.stack([keys[b][t], values[b][t]], 1).reshape(4, 8)
        query[cu[-1] : cu[-1] + end - start] = queries[b][start:end]
        cu.append(cu[-1] + end - start)
    numbers = np.array(cu, np.int32), np.array([end for _, end in spans], np.int32), table
    kept = np.stack([counts(*span, n) for span, n in zip(spans, LENGTHS, strict=True)])
    found = attend(query, pages, *numbers, counts=kept, lengths=np.array(LENGTHS, np.int32))
    for b, (start, end) in enumerate(spans):
        if start < end:
            own = found[cu[b] : cu[b + 1]]
            np.testing.assert_allclose(own, alone(arrays, b, start, end), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_dense_requests_among_sparse_ones(arrays, attend):
    """A chunk that begins inside a row, and one that is dense."""
    queries, keys, values, table = arrays
    pages = np.zeros((len(LENGTHS) * PAGES, PAGE, 4, 16), np.float32)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            pages[table[b, t // PAGE], t % PAGE, :, :8] = np.stack([keys[b][t], values[b][t]], 1).reshape(4, 8)
    query = np.zeros((256, 4, 8), np.float32)
    query[:60], query[60:63], query[63:163] = queries[0][61:], queries[1][83:], queries[2][28:]
    numbers = np.array([0, 60, 63, 163], np.int32), np.array(LENGTHS, np.int32), table
    kept = np.stack([counts(61, 121, 121, 1.0), np.full(2, ragged.DENSE), counts(28, 128, 128, 1.0)]).astype(np.int32)
    found = attend(query, pages, *numbers, counts=kept, lengths=np.array(LENGTHS, np.int32))
    np.testing.assert_allclose(found, xsake.ragged_attention(query, pages, *numbers), rtol=2e-5, atol=2e-5)
