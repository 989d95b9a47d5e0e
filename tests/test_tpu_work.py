"""Lists and records of the TPU kernels, and the axes that they index, checked against the mask's blocks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xsake
from xsake.kernels_pallas_tpu.launch import Refs, grid_places
from xsake.kernels_pallas_tpu.tile.tiles import Axis, pitch_of, tile_of
from xsake.kernels_pallas_tpu.work import WORDS, lists_and_records


def _axis(length, block, unit, limit):
    pitch = pitch_of(block, length, unit)
    return Axis(length, block, pitch, tile_of(pitch, limit, unit))


def _walked(work, axis, step):
    """The tiles that a kernel would visit in a step."""
    start, tiles, full = np.asarray(work.records).reshape(-1, WORDS)[step, :3]
    entries = np.asarray(work.lists).reshape(-1)[start : start + -(-tiles // axis.split)]
    numbers = [int(e) * axis.split + s for e in entries for s in range(axis.split)]
    return numbers[:tiles], int(full)


@settings(max_examples=3)  # each compiles for its own shapes
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([4, 6, 8, 24]),
    st.sampled_from([4, 12, 16]),
    st.integers(0, 99),
)
def test_every_active_tile_is_walked_once(q_len, kv_len, block_q, block_kv, seed):
    rng = np.random.default_rng(seed)
    blocks = rng.random((1, 2, -(-q_len // block_q), -(-kv_len // block_kv))) < 0.5
    mask = xsake.BlockMask.from_blocks(blocks, block_q=block_q, block_kv=block_kv, q_len=q_len, kv_len=kv_len)
    q, kv = _axis(q_len, block_q, 4, 8), _axis(kv_len, block_kv, 4, 8)
    b, h, i = grid_places(2, 4, q.tiles)
    work = lists_and_records(
        mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, rows=q, columns=kv, steps=(b * 0, h // 2, i)
    )
    records = np.asarray(work.records).reshape(-1, WORDS)
    for step in range(len(i)):
        tiles, full = _walked(work, kv, step)
        active = np.flatnonzero(blocks[0, h[step] // 2, i[step] // q.split])
        expected = [j * kv.split + s for j in active for s in range(kv.split) if j * kv.split + s < kv.tiles]
        assert sorted(tiles) == expected
        assert full <= len(tiles)
        if step + 1 < len(i):
            assert (records[step, 3:6] == records[step + 1, :3]).all()
        else:
            assert (records[step, 3:6] == 0).all()
        # The window that is brought into SMEM, from an aligned entry on, holds the step's part.
        assert records[step, 0] % 128 + -(-len(tiles) // kv.split) <= work.window * 128
        assert (records[step, 0] // 128 + work.window) * 128 <= work.lists.size


@pytest.mark.parametrize(
    ("length", "block", "unit", "limit"), [(100, 16, 8, 16), (100, 12, 8, 16), (5, 128, 16, 512), (300, 384, 128, 128)]
)
def test_cut_and_uncut(length, block, unit, limit):
    axis = _axis(length, block, unit, limit)
    x = jnp.arange(2 * length * 3, dtype=jnp.float32).reshape(2, length, 3)
    tiles = axis.cut(x, 1, fill=-1)
    assert tiles.shape == (2, axis.tiles, axis.tile, 3)
    assert (tiles == -1).sum() == 2 * 3 * (axis.tiles * axis.tile - length)
    np.testing.assert_array_equal(axis.uncut(tiles, 1), x)


def test_indices_out_of_range_stay_inside():
    """Bounds checks of transfers are off: a broken list must not make a transfer leave its array."""
    mask = xsake.BlockMask.full(64, 64, block_q=16, block_kv=16)
    q = kv = _axis(64, 16, 16, 16)
    b, h, i = grid_places(1, 1, q.tiles)
    broken = mask.kv_indices.at[0, 0, 0].set(99).at[0, 0, 1].set(-5)
    work = lists_and_records(broken, mask.kv_row_ptr, mask.kv_num_full, rows=q, columns=kv, steps=(b, h, i))
    assert int(work.lists.min()) >= 0
    assert int(work.lists.max()) < kv.blocks


def test_a_name_that_a_kernel_does_not_have_is_an_error():
    refs = Refs(["query", "acc"], [1, 2])
    assert refs.acc == 2 and "query" in refs and "bias" not in refs
    with pytest.raises(AttributeError, match=r"no operand or scratch named 'total'; it has \['acc', 'query'\]"):
        _ = refs.total
    with pytest.raises(ValueError, match="different names"):
        Refs(["lse", "lse"], [1, 2])
