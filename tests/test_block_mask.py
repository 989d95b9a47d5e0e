"""Every invariant of the BlockMask contract, on masks that Hypothesis draws."""

from __future__ import annotations

import dataclasses
import itertools

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_mask import LISTS, Drawn, arrays, drawn, fewer, rows_of
from hypothesis import given

import xsake
from xsake import BlockMask
from xsake.hads import density_bucket

# -- lists -------------------------------------------------------------------------------------------------------------


@given(drawn())
def test_rows_list_full_blocks_ascending_then_partial_ascending(d):
    built, full = d.build(), d.full
    np.testing.assert_array_equal(built.to_blocks(), d.active)
    mask = arrays(built)
    for b, h in np.ndindex(d.blocks.shape[:2]):
        rows = rows_of(mask["kv_indices"][b, h], mask["kv_row_ptr"][b, h])
        for i, row in enumerate(rows):
            active = d.active[b, h, i]
            assert row == [*np.flatnonzero(active & full[i]), *np.flatnonzero(active & ~full[i])]
            assert mask["kv_num_full"][b, h, i] == (active & full[i]).sum()


@given(drawn())
def test_transpose_is_exact(d):
    mask, full = arrays(d.build()), d.full
    assert mask["q_indices"].shape == mask["kv_indices"].shape
    for b, h in np.ndindex(d.blocks.shape[:2]):
        for j, column in enumerate(rows_of(mask["q_indices"][b, h], mask["q_row_ptr"][b, h])):
            active = d.active[b, h, :, j]
            assert column == [*np.flatnonzero(active & full[:, j]), *np.flatnonzero(active & ~full[:, j])]
            assert mask["q_num_full"][b, h, j] == (active & full[:, j]).sum()


@given(drawn(), st.integers(0, 5))
def test_padding_slots_repeat_the_last_entry(d, spare):
    need = int(d.active.sum((-2, -1)).max())
    mask = arrays(d.build(capacity=max(1, need + spare)))
    for indices, ptr in (("kv_indices", "kv_row_ptr"), ("q_indices", "q_row_ptr")):
        for b, h in np.ndindex(d.blocks.shape[:2]):
            used = mask[ptr][b, h, -1]
            assert used == d.active[b, h].sum()
            padding = mask[indices][b, h, used:]
            assert (padding == (mask[indices][b, h, used - 1] if used else 0)).all()


def test_tail_blocks_are_never_full():
    mask = BlockMask.full(100, 70, block_q=32, block_kv=32)
    assert np.asarray(mask.kv_num_full).tolist() == [[[2, 2, 2, 0]]]
    assert np.asarray(mask.q_num_full).tolist() == [[[3, 3, 0]]]


@given(drawn())
def test_orders_are_longest_first(d):
    mask = arrays(d.build())
    for order, ptr in (("row_order", "kv_row_ptr"), ("col_order", "q_row_ptr")):
        lengths = np.diff(mask[ptr], axis=-1)
        assert (np.sort(mask[order], -1) == np.arange(lengths.shape[-1])).all()
        assert (np.diff(np.take_along_axis(lengths, mask[order].astype(int), -1), axis=-1) <= 0).all()


@given(drawn())
def test_shapes_and_types(d):
    mask = d.build()
    b, h, n, m = d.blocks.shape
    c = mask.capacity
    shapes = dict(zip(LISTS, [(c,), (n + 1,), (n,), (n,), (c,), (m + 1,), (m,), (m,)], strict=True))
    for name, shape in shapes.items():
        chex.assert_shape(getattr(mask, name), (b, h, *shape))
        assert getattr(mask, name).dtype == np.int32
        assert isinstance(getattr(mask, name), jax.Array)
    assert (mask.batch, mask.heads, mask.num_q_blocks, mask.num_kv_blocks) == (b, h, n, m)


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_blocks_of_two_three_and_four_dimensions(ndim):
    blocks = np.random.default_rng(0).random((2, 3, 4, 4)) < 0.5
    given_, expected = {2: (blocks[0, 0], blocks[:1, :1]), 3: (blocks[0], blocks[:1]), 4: (blocks, blocks)}[ndim]
    mask = BlockMask.from_blocks(given_, block_q=8, block_kv=8, q_len=32, kv_len=32)
    np.testing.assert_array_equal(mask.to_blocks(), expected)


@given(drawn())
def test_without_a_transpose(d):
    mask, whole = d.build(transpose=False), d.build()
    assert mask.q_indices is mask.q_row_ptr is mask.q_num_full is mask.col_order is None
    assert not mask.has_transpose and whole.has_transpose
    np.testing.assert_array_equal(mask.kv_indices, whole.kv_indices)
    np.testing.assert_array_equal(mask.to_blocks(), d.active)


# -- capacity ----------------------------------------------------------------------------------------------------------


@given(drawn())
def test_capacity_is_the_need_rounded_up_to_a_power_of_two(d):
    """(Or all blocks that the rule allows, if that is less: more can never be needed.)"""
    need, capacity = int(d.active.sum((-2, -1)).max()), d.build().capacity
    power = 1
    while power < need:
        power *= 2
    assert need <= capacity <= power
    assert capacity in (power, max(int(d.allowed.sum()), 1))


@given(drawn())
def test_capacity_too_small_raises(d):
    need = int(d.active.sum((-2, -1)).max())
    d.build(capacity=max(need, 1))
    if need > 1:
        with pytest.raises(ValueError, match=rf"capacity={need - 1}.*{need} active blocks.*capacity>={need}"):
            d.build(capacity=need - 1)


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="capacity=0"):
        BlockMask.from_blocks(np.zeros((2, 2), bool), block_q=8, block_kv=8, q_len=16, kv_len=16, capacity=0)


@fewer
@given(drawn(), st.booleans())
def test_traced_equals_eager(d, given_capacity):
    eager = d.build()
    capacity = eager.capacity if given_capacity else None
    traced = jax.jit(lambda blocks: BlockMask.from_blocks(blocks, **d.sizes, capacity=capacity))(d.blocks)
    if not given_capacity:
        assert traced.capacity == max(int(d.allowed.sum()), 1)
        eager = d.build(capacity=traced.capacity)
    for name in LISTS:
        np.testing.assert_array_equal(getattr(traced, name), getattr(eager, name), err_msg=name)
    np.testing.assert_array_equal(traced.to_blocks(), d.active)


def test_traced_views_equal_eager_ones():
    d = Drawn(
        np.random.default_rng(1).random((2, 3, 5, 7)) < 0.4,
        dict(block_q=7, block_kv=5, q_len=33, kv_len=34, is_causal=True, local_window_size=(19, None)),
    )
    mask = d.build()
    blocks, elements, density, per_head = jax.jit(
        lambda m: (m.to_blocks(), m.to_elements(), m.density(), m.density(per_head=True))
    )(mask)
    np.testing.assert_array_equal(blocks, mask.to_blocks())
    np.testing.assert_array_equal(elements, mask.to_elements())
    np.testing.assert_allclose(density, mask.density(), rtol=1e-6)
    np.testing.assert_allclose(per_head, mask.density(per_head=True), rtol=1e-6)


def test_traced_overflow_is_known():
    blocks = np.zeros((1, 2, 4, 4), bool)
    blocks[0, 1] = True
    sizes = dict(block_q=8, block_kv=8, q_len=32, kv_len=32)
    mask = jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, capacity=8))(blocks)
    assert np.asarray(mask.overflowed()).tolist() == [[False, True]]
    assert mask.capacity == 8


# -- other constructors ------------------------------------------------------------------------------------------------


@fewer
@given(drawn(), st.randoms(use_true_random=False))
def test_from_indices(d, random):
    """Any order, -1 anywhere, repeats count once; traced or not."""
    b, h, n, m = d.blocks.shape
    width = 2 * m + 1
    indices = np.full((b, h, n, width), -1, np.int32)
    for at in np.ndindex(b, h, n):
        row = list(np.flatnonzero(d.blocks[at]))
        row += [random.choice(row) for _ in range(random.randint(0, width - len(row)))] if row else []
        row += [-1] * (width - len(row))
        random.shuffle(row)
        indices[at] = row
    mask = BlockMask.from_indices(indices, **d.sizes)
    expected = d.build()
    traced = jax.jit(lambda x: BlockMask.from_indices(x, **d.sizes, capacity=expected.capacity))(indices)
    for name in LISTS:
        np.testing.assert_array_equal(getattr(mask, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(getattr(traced, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("wrong", [-2, 4, 100])
def test_from_indices_out_of_range(wrong):
    sizes = dict(block_q=8, block_kv=8, q_len=16, kv_len=32)
    with pytest.raises(ValueError, match=rf"kv_indices must be -1 .* in \[0, 4\).*{wrong}"):
        BlockMask.from_indices([[0, 1], [2, wrong]], **sizes)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
@pytest.mark.parametrize("of_tokens", [False, True])
def test_block_numbers_of_any_integers(dtype, of_tokens):
    """Neither -1 nor 128, the number of blocks, may be a value of the dtype."""
    numbers = np.arange(128, dtype=dtype)

    def make(numbers):
        if of_tokens:
            counts = np.ones((1, 128, 1), dtype)
            return BlockMask.from_token_indices(numbers[None, :, None, None], counts, block_q=8, block_kv=1)
        return BlockMask.from_indices(numbers[:, None], block_q=1, block_kv=1, q_len=128, kv_len=128)

    for mask in (make(numbers), jax.jit(make)(numbers)):
        np.testing.assert_array_equal(mask.to_elements()[0, 0], np.eye(128, dtype=bool))


@given(drawn())
def test_full_is_all_that_the_rule_allows(d):
    mask = BlockMask.full(**d.sizes)
    np.testing.assert_array_equal(mask.to_blocks()[0, 0], d.allowed)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], d.elements_of_rule)
    assert (mask.batch, mask.heads) == (1, 1)
    if d.allowed.any():
        assert float(mask.density()) == 1.0


# -- tree --------------------------------------------------------------------------------------------------------------


@given(drawn())
def test_is_a_pytree_of_its_lists(d):
    mask = d.build()
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == len(LISTS) and all(leaf.dtype == jnp.int32 for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, BlockMask) and again.block_q == mask.block_q and again.density_hint == mask.density_hint
    hash(structure)


def test_new_contents_do_not_retrace():
    sizes = dict(block_q=8, block_kv=8, q_len=60, kv_len=60, is_causal=True)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def active(mask):
        return mask.kv_row_ptr[..., -1]

    chex.clear_trace_counter()
    rng = np.random.default_rng(0)
    for _ in range(4):
        blocks = rng.random((3, 8, 8)) < 0.5
        mask = BlockMask.from_blocks(blocks, **sizes, capacity=36, density_hint=0.5)
        assert np.asarray(active(mask)).tolist() == [(blocks & np.tri(8, dtype=bool)).sum((1, 2)).tolist()]


def test_slightly_different_contents_have_one_structure():
    """Built without a capacity: the power of two and the density bucket absorb small changes."""
    a, b = (xsake.patterns.random(512, 512, density=x, seed=0, block_q=32, block_kv=32) for x in (0.36, 0.34))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [x.shape for x in jax.tree.leaves(a)] == [x.shape for x in jax.tree.leaves(b)]


def test_is_frozen():
    mask = BlockMask.full(32, 32, block_q=16, block_kv=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.block_q = 8


def test_density_hint_is_a_log_bucket():
    hints = [
        BlockMask.from_blocks(
            np.arange(1024).reshape(32, 32) < n, block_q=8, block_kv=8, q_len=256, kv_len=256
        ).density_hint
        for n in range(0, 1025, 8)
    ]
    assert hints[-1] == 1.0 and all(0 < a <= b <= 1 for a, b in itertools.pairwise(hints))
    distinct = sorted(set(hints))
    assert len(distinct) < 25
    ratios = np.array(distinct[1:]) / np.array(distinct[:-1])
    assert (ratios > 1.3).all(), "buckets are a constant factor apart"


@given(st.floats(1e-9, 1))
def test_density_bucket_is_near(density):
    bucket = density_bucket(density)
    assert bucket == density_bucket(bucket), "a bucket is in itself"
    if density >= 2**-10:
        assert 2**-0.26 <= bucket / density <= 2**0.26


def test_density_hint_can_be_given_and_is_unknown_under_jit():
    sizes = dict(block_q=8, block_kv=8, q_len=16, kv_len=16)
    assert BlockMask.from_blocks(np.ones((2, 2), bool), **sizes, density_hint=0.25).density_hint == 0.25
    assert jax.jit(lambda x: BlockMask.from_blocks(x, **sizes))(np.ones((2, 2), bool)).density_hint is None
    assert (
        jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, density_hint=0.5))(np.ones((2, 2), bool)).density_hint
        == 0.5
    )


def test_only_masks_that_may_not_fit_are_checked_in_the_call():
    sizes = dict(block_q=64, block_kv=64, q_len=128, kv_len=128)
    ones = np.ones((2, 2), bool)
    assert BlockMask.from_blocks(ones, **sizes).complete
    assert BlockMask.from_blocks(ones, **sizes, capacity=4).complete
    assert jax.jit(lambda x: BlockMask.from_blocks(x, **sizes))(ones).complete  # room for all
    assert not jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, capacity=3))(ones).complete
    indices = np.array([[0, 1], [0, 9]])
    assert not jax.jit(lambda x: BlockMask.from_indices(x, **sizes))(indices).complete  # one is out of range
