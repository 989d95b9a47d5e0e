"""`a | b` and `a & b`: exact to the element for any rules and bitmaps, and never silent about lost blocks."""

from __future__ import annotations

import operator

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_mask import Drawn, drawn, fewer, windows
from hypothesis import given

import xsake
from xsake import BlockMask
from xsake.kernels_xla_ref import oracle

OPERATORS = {"union": operator.or_, "intersection": operator.and_}
SIZES = dict(block_q=16, block_kv=16, q_len=64, kv_len=64)


@st.composite
def masks(draw, like: Drawn) -> tuple[BlockMask, np.ndarray]:
    """A mask of the blocks and lengths of `like`, with a rule or with bitmaps, and the elements that attend."""
    lead = tuple(draw(st.sampled_from([1, n])) for n in like.blocks.shape[:2])
    if draw(st.booleans()):
        blocks = draw(hnp.arrays(bool, (*lead, *like.blocks.shape[2:])))
        rule = dict(is_causal=draw(st.booleans()), local_window_size=draw(windows))
        d = Drawn(blocks, like.sizes | rule)
        rows, columns = np.arange(d.sizes["q_len"]), np.arange(d.sizes["kv_len"])
        elements = blocks[:, :, rows // d.sizes["block_q"]][:, :, :, columns // d.sizes["block_kv"]]
        return d.build(), elements & d.elements_of_rule
    elements = draw(hnp.arrays(bool, (*lead, like.sizes["q_len"], like.sizes["kv_len"])))
    sizes = {name: like.sizes[name] for name in ("block_q", "block_kv", "q_len", "kv_len")}
    size = dict(batch=lead[0], heads=lead[1])
    return xsake.patterns.from_function(function=lambda *at: elements[at], of="tokens", **size, **sizes), elements


def check(combined: BlockMask, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(combined.to_elements(), expected)
    # The lists say no more than the elements, and the transpose says the same.
    assert not (np.asarray(combined.to_blocks()) & ~blocks_of(combined, expected)).any()
    assert int(combined.kv_row_ptr[..., -1].sum()) == int(combined.q_row_ptr[..., -1].sum())


def blocks_of(mask: BlockMask, elements: np.ndarray) -> np.ndarray:
    pad = [(0, 0), (0, 0), (0, -mask.q_len % mask.block_q), (0, -mask.kv_len % mask.block_kv)]
    shape = (*elements.shape[:2], mask.num_q_blocks, mask.block_q, mask.num_kv_blocks, mask.block_kv)
    return np.pad(elements, pad).reshape(shape).any((3, 5))


@pytest.mark.parametrize("name", OPERATORS)
@given(st.data())
def test_every_element(name, data):
    like = data.draw(drawn())
    (a, x), (b, y) = data.draw(masks(like)), data.draw(masks(like))
    op = OPERATORS[name]
    check(op(a, b), op(x, y))
    np.testing.assert_array_equal(getattr(a, name)(b).to_elements(), op(x, y))


@fewer
@given(st.data())
def test_every_element_under_jit(data):
    like = data.draw(drawn())
    (a, x), (b, y) = data.draw(masks(like)), data.draw(masks(like))
    first = data.draw(st.booleans())  # one mask may be concrete
    given = (a, b) if first else (a,)
    combined = jax.jit(lambda *of: [op(of[0], of[1] if first else b) for op in OPERATORS.values()])(*given)
    for op, mask in zip(OPERATORS.values(), combined, strict=True):
        np.testing.assert_array_equal(mask.to_elements(), op(x, y))


def first_keys(**options) -> BlockMask:
    """The first column of blocks, causal."""
    return BlockMask.from_blocks(np.arange(4) + np.zeros((4, 1)) == 0, **SIZES, is_causal=True, **options)


def test_numbers_and_gradients_of_a_union():
    mask = first_keys() | xsake.patterns.sliding_window(64, 64, window=20, block_q=16, block_kv=16)
    assert mask.bitmaps is not None and mask.local_window_size == (None, 20)
    q, k = np.ogrid[:64, :64]
    attends = (abs(q - k) <= 20) | ((k < 16) & (k <= q))
    bias = jnp.asarray(np.where(attends, 0.0, -np.inf), jnp.float32)[None, None]
    q, k, v = (jax.random.normal(key, (1, 64, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))

    def run(attention, **options):
        return jax.jit(jax.value_and_grad(lambda q: (attention(q, k, v, **options) ** 2).sum()))(q)

    for found, expected in zip(run(xsake.attention, mask=mask), run(oracle.attention, bias=bias), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_the_rule_of_the_result():
    causal = xsake.patterns.causal(64, 64, block_q=16, block_kv=16)
    window = xsake.patterns.sliding_window(64, 64, window=(20, None), block_q=16, block_kv=16)
    both = causal & window
    assert (both.is_causal, both.local_window_size, both.bitmaps) == (True, (20, None), None)
    either = causal | xsake.patterns.sliding_window(64, 64, window=20, is_causal=True, block_q=16, block_kv=16)
    assert (either.is_causal, either.local_window_size, either.bitmaps) == (True, None, None)
    assert (causal | xsake.patterns.dense(64, 64, block_q=16, block_kv=16)).bitmaps is None


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_q=8), "the same block_q; got 16 and 8"),
        (dict(kv_len=63), "the same kv_len; got 64 and 63"),
        (dict(blocks=(3, 1)), "the same batch, or 1; got 2 and 3"),
        (dict(blocks=(1, 4)), "the same heads, or 1; got 5 and 4"),
    ],
)
def test_masks_that_do_not_fit_together(name, change, message):
    def build(blocks=(2, 5), **sizes):
        return BlockMask.from_blocks(np.ones((*blocks, -(-sizes["q_len"] // sizes["block_q"]), 4), bool), **sizes)

    with pytest.raises(ValueError, match=message):
        OPERATORS[name](build(**SIZES), build(**(SIZES | change)))


def test_a_mask_combines_with_masks_only():
    mask = BlockMask.full(64, 64)
    with pytest.raises(TypeError, match="another BlockMask, got ndarray"):
        mask | np.ones((1, 1), bool)


def test_masks_without_a_transpose():
    a, b = BlockMask.full(**SIZES), first_keys(transpose=False)
    assert not (a & b).has_transpose and (a & a).has_transpose
    either = b | BlockMask.full(**SIZES, local_window_size=3)
    assert either.bitmaps is not None and not either.has_transpose


def test_a_capacity_under_jit():
    x, y = np.random.default_rng(2).random((2, 3, 4, 4)) < 0.5
    a, b = (BlockMask.from_blocks(z, **SIZES, capacity=16) for z in (x, y))
    union, overflowed = jax.jit(lambda a, b: (a.union(b, capacity=16), a.union(b, capacity=1).overflowed()))(a, b)
    np.testing.assert_array_equal(union.to_blocks()[0], x | y)
    assert overflowed.all()
