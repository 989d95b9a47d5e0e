"""What a BlockMask gives besides its lists: elements, density, pictures, sharding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from drawn_mask import drawn
from hypothesis import given
from jax.sharding import PartitionSpec

import xsake
from xsake import BlockMask


@given(drawn())
def test_to_elements(d):
    elements = d.build().to_elements()
    assert elements.shape == (*d.blocks.shape[:2], d.sizes["q_len"], d.sizes["kv_len"])
    rows = np.arange(d.sizes["q_len"]) // d.sizes["block_q"]
    columns = np.arange(d.sizes["kv_len"]) // d.sizes["block_kv"]
    np.testing.assert_array_equal(elements, d.blocks[:, :, rows][:, :, :, columns] & d.elements_of_rule)


@given(drawn())
def test_density(d):
    mask = d.build()
    per_head = d.active.sum((-2, -1)) / max(d.allowed.sum(), 1)
    np.testing.assert_allclose(mask.density(per_head=True), per_head, rtol=1e-6)
    np.testing.assert_allclose(mask.density(), per_head.mean(), rtol=1e-6)


def test_picture():
    mask = BlockMask.from_blocks(
        np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]], bool),
        block_q=8,
        block_kv=8,
        q_len=20,
        kv_len=20,
    )
    text = str(mask)
    first, *rest = text.splitlines()
    assert "20 x 20" in first and "8 x 8" in first
    assert rest[0].split() == ["head", "0", "55.6%", "head", "1", "33.3%"]
    assert [line.split() for line in rest[1:]] == [["█··", "█··"], ["██·", "·█·"], ["·██", "··█"]]
    assert "█" not in repr(mask) and "20 x 20" in repr(mask)


@given(drawn())
def test_every_mask_has_a_picture(d):
    text = str(d.build())
    assert len(text.splitlines()) > 1
    assert ("█" in text) == bool(d.active.any())


def test_pictures_of_large_masks_and_of_trees_without_contents():
    mask = xsake.patterns.random(8192, 8192, density=0.3, seed=0, heads=20, block_q=16, block_kv=16)
    text = str(mask)
    assert len(text.splitlines()) < 120 and max(map(len, text.splitlines())) <= 120 and "more" in text
    assert "BlockMask(" in str(mask.partition_spec("b", "h"))
    seen = []
    jax.jit(lambda m: seen.append(str(m)) or m.kv_indices)(mask)
    assert "BlockMask(" in seen[0]


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_partition_spec(batch, heads):
    mask = BlockMask.from_blocks(np.ones((batch, heads, 2, 2), bool), block_q=8, block_kv=8, q_len=16, kv_len=16)
    specs = mask.partition_spec("data", "model")
    assert jax.tree.structure(specs) == jax.tree.structure(mask)
    expected = PartitionSpec("data" if batch > 1 else None, "model" if heads > 1 else None, None)
    assert all(
        tuple(spec) == tuple(expected)
        for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    )
    nothing = jax.tree.leaves(mask.partition_spec(), is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert all(all(axis is None for axis in spec) for spec in nothing)
