"""Masks that lost blocks under jit: an error wherever it is known, and NaN in their heads, on every road from there."""

from __future__ import annotations

import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import xsake
from xsake import BlockMask
from xsake.kernels_xla_ref import oracle
from xsake.model import attention_fn

OPERATORS = (operator.or_, operator.and_)
SIZES = dict(block_q=16, block_kv=16, q_len=64, kv_len=64)
EXCHANGES = ("gather", "ring", "sparse")


def lossy(blocks):
    """A mask that lists 4 of its blocks."""
    return BlockMask.from_blocks(blocks, capacity=4, **SIZES)


def wrong(blocks):
    """A mask of a block that does not exist."""
    return BlockMask.from_indices(jnp.where(blocks[..., :1], 9, 0), **SIZES)


def banded(blocks):
    """A mask with a rule of its own, so that the result has bitmaps."""
    return BlockMask.from_blocks(blocks, capacity=4, **SIZES, local_window_size=20)


ALL, DIAGONAL = np.ones((4, 4), bool), np.eye(4, dtype=bool)
QUERY = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))


@pytest.mark.parametrize("build", [lossy, wrong, banded])
def test_lost_blocks_stay_lost(build):
    """What overflowed, or named blocks out of range, stays so under jit and is an error outside, on either side."""
    other, operators = BlockMask.from_blocks(DIAGONAL, **SIZES), OPERATORS

    @jax.jit
    def run(mask):
        pairs = (mask, other), (other, mask), (mask, mask)
        found = [op(*pair) for op in operators for pair in pairs]
        assert not any(mask.complete for mask in found), "heads that overflowed give NaN"
        return [mask.overflowed() for mask in found]

    broken, whole = map(jax.jit(build), (ALL, np.zeros((4, 4), bool)))
    assert all(overflowed.all() for overflowed in run(broken))
    assert not whole.complete
    for op, pair in itertools.product(operators, [(broken, other), (other, broken)]):
        for combine in (op, lambda *_, op=op, pair=pair: jax.jit(lambda: op(*pair))()):
            with pytest.raises(ValueError, match="does not fit it, or names blocks out of range"):
                combine(*pair)
    assert all(op(whole, other).complete for op in operators), "a mask that fits is whole once it is concrete"


def test_a_choice_that_overflowed_stays_lost_in_a_union():
    chosen = jnp.zeros((1, 64, 1, 1), jnp.int32) + jnp.arange(64, dtype=jnp.int32)[None, :, None, None] // 16

    @jax.jit
    def run(chosen):
        mask = BlockMask.from_token_indices(chosen, block_kv=16, block_q=16, capacity=2)
        return xsake.attention(QUERY, QUERY, QUERY, mask | BlockMask.from_blocks(DIAGONAL, **SIZES))

    assert np.isnan(run(chosen)).all()


def mesh():
    return jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,))


def attend(mask):
    return xsake.attention(QUERY, QUERY, QUERY, mask)


def sharded(mask, exchange="gather"):
    capacity = 2 if exchange == "sparse" else None
    options = dict(mesh=mesh(), sequence="sequence", exchange=exchange, capacity=capacity)
    return xsake.sharded_attention(QUERY, QUERY, QUERY, mask, **options)


def at_a_cached_query(mask):
    return attention_fn(QUERY[:, :1], QUERY, QUERY, input_positions=jnp.array([63]), block_mask=mask)


def read_back(mask, folder):
    mask.save(folder / "mask.npz")
    return BlockMask.load(folder / "mask.npz")


ROADS = {
    "attention": attend,
    "attention in another jit": lambda mask: jax.jit(lambda: attend(mask))(),
    "the oracle": lambda mask: oracle.attention(QUERY, QUERY, QUERY, mask),
    "blocks": BlockMask.to_blocks,
    "elements": BlockMask.to_elements,
    "listed elements": BlockMask.to_listed,
    "density": BlockMask.density,
    "density per head": lambda mask: mask.density(per_head=True),
    "rows": lambda mask: mask.shard_rows(2),
    "a cached query": at_a_cached_query,
    **{exchange: lambda mask, exchange=exchange: sharded(mask, exchange) for exchange in EXCHANGES},
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("build", [lossy, wrong])
def test_an_error_where_it_is_known(build, road, tmp_path):
    broken = jax.jit(build)(ALL)
    for mask in (broken, read_back(broken, tmp_path), jax.tree.map(jnp.asarray, broken)):
        with pytest.raises(ValueError, match="does not fit it, or names blocks out of range"):
            ROADS[road](mask)


def two_heads(build):
    """Head 0 lost blocks, head 1 has all of its."""
    return jax.jit(build)(jnp.asarray(np.stack([ALL, np.zeros((4, 4), bool)])))


def wrong_choice(blocks):
    """Tokens of the heads whose blocks are given choose a block that does not exist."""
    chosen = jnp.where(blocks[None, None, :, 0, :1], 9, 0) + jnp.zeros((1, 64, 1, 1), jnp.int32)
    return BlockMask.from_token_indices(chosen, block_kv=16, block_q=16, capacity=16)


def poisoned_head(out):
    return np.isnan(out[:, :, 0]).all() and np.isfinite(out[:, :, 1]).all()


@pytest.mark.parametrize("build", [lossy, wrong, wrong_choice])
def test_only_the_heads_that_lost_blocks_are_poisoned(build):
    mask = two_heads(build)
    out, density, mean = jax.jit(lambda mask: (attend(mask), mask.density(per_head=True), mask.density()))(mask)
    assert poisoned_head(out) and np.isnan(mean)
    assert np.isnan(density[0, 0]) and np.isfinite(density[0, 1])


def mapped(mask):
    return jax.vmap(attend)(jax.tree.map(lambda x: jnp.stack([x, x]), mask))[1]


TRACED = {
    "the oracle": ROADS["the oracle"],
    "vmap of stacked masks": mapped,
    "a union with another rule": lambda mask: attend(mask | BlockMask.from_blocks(DIAGONAL, **SIZES, is_causal=True)),
    **{exchange: ROADS[exchange] for exchange in EXCHANGES},
}


@pytest.mark.parametrize("road", TRACED)
def test_nan_on_every_road(road):
    assert poisoned_head(jax.jit(TRACED[road])(two_heads(lossy)))


def test_nan_in_gradients():
    """The first row of blocks lists all that fits; the loss is NaN in every row."""

    def gradient(mask):
        return jax.grad(lambda query: (xsake.attention(query, QUERY, QUERY, mask) ** 2).sum())(QUERY)

    found = jax.jit(gradient)(two_heads(lossy))
    assert np.isnan(found[:, :16, 0]).all() and np.isfinite(found[:, :, 1]).all()


def test_the_density_of_shards_is_nan():
    density = jax.jit(lambda mask: mask.shard_rows(2).density(per_head=True))(two_heads(lossy))
    assert np.isnan(density[0, 0]) and np.isfinite(density[0, 1])


def test_nan_after_export():
    mask = two_heads(lossy)
    stored = export.export(jax.jit(attend))(mask).serialize()
    assert poisoned_head(export.deserialize(stored).call(mask))


def test_nan_in_the_sequences_that_lost_blocks_alone():
    query = jnp.repeat(QUERY, 2, 0)
    numbers = jnp.asarray([[[[0], [1], [9], [3]]], [[[0], [1], [2], [3]]]])
    run = jax.jit(lambda numbers: xsake.attention(query, query, query, BlockMask.from_indices(numbers, **SIZES)))
    out = run(numbers)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_shards_that_are_too_small():
    mask = BlockMask.from_blocks(ALL, **SIZES)
    rows = jax.jit(lambda mask: mask.shard_rows(2, capacity=4))(mask)
    for use in (sharded, lambda rows: rows.density(), lambda rows: rows.blocks_walked(), lambda r: r.most_to_send(2)):
        with pytest.raises(ValueError, match="does not fit it, or names blocks out of range"):
            use(rows)
    assert np.isnan(jax.jit(sharded)(rows)).all()


def test_a_picture_says_that_blocks_are_lost():
    assert str(two_heads(lossy)).endswith("that overflowed its capacity, or names blocks out of range")
    whole = jax.jit(lossy)(DIAGONAL)
    assert not whole.complete and "25.0%" in str(whole)


def test_a_poisoned_count_does_not_wrap():
    mask = two_heads(lossy)
    again = jax.jit(lambda mask: [mask := mask.poisoned(jnp.array([[True, False]])) for _ in range(5)][-1])(mask)
    assert again.kv_row_ptr[0, :, -1].tolist() == [16, 0]
