"""Short blocks of keys merged to columns of 64 or 128 keys: the lists beside dense arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import xsake
from xsake.kernels_pallas_gpu.lists.wide_columns import run_of, wide_columns


@pytest.mark.parametrize("block_kv", [16, 32, 48])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_columns_list_what_any_of_their_runs_lists(block_kv, width, is_causal):
    q_len, kv_len, heads = 300, 341, 3
    shape = heads, -(-q_len // 64), -(-kv_len // block_kv)
    blocks = np.random.default_rng(block_kv).random(shape) < 0.3
    blocks[0, :, : 512 // block_kv] = True  # full entries
    blocks[1] = False
    mask = xsake.BlockMask.from_blocks(
        blocks, block_q=64, block_kv=block_kv, q_len=q_len, kv_len=kv_len, is_causal=is_causal
    )
    lists, runs = jax.jit(lambda mask: wide_columns(mask, width))(mask)

    run = run_of(block_kv, width)
    active, full = (np.repeat(x, block_kv // run, -1) for x in (mask.to_blocks()[0], _full(mask)))
    columns = -(-active.shape[-1] * run // width)
    spare = ((0, 0), (0, 0), (0, columns * width // run - active.shape[-1]))
    active = np.pad(active, spare).reshape(heads, shape[1], columns, -1)
    full = np.pad(full, spare, constant_values=True).reshape(active.shape)
    for head in range(heads):
        lengths = active[head].any(-1).sum(0)
        np.testing.assert_array_equal(np.diff(lists.row_ptr[0, head]), lengths)
        np.testing.assert_array_equal(lengths[lists.order[0, head]], np.sort(lengths)[::-1])
        for column in range(columns):
            at = slice(*lists.row_ptr[0, head, column : column + 2])
            rows, first = lists.indices[0, head, at], lists.num_full[0, head, column]
            np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(active[head, :, column].any(-1)))
            bits = (np.asarray(runs[0, head, at])[:, None] >> np.arange(width // run)) & 1
            np.testing.assert_array_equal(bits, active[head, rows, column])
            np.testing.assert_array_equal(np.arange(len(rows)) < first, full[head, rows, column].all(-1))


def _full(mask):
    """bool[heads, nQ, nK]: which listed blocks need no test of elements."""
    found = np.zeros((mask.heads, mask.num_q_blocks, mask.num_kv_blocks), bool)
    for head, row in np.ndindex(found.shape[:2]):
        begin, full = mask.kv_row_ptr[0, head, row], mask.kv_num_full[0, head, row]
        found[head, row, mask.kv_indices[0, head, begin : begin + full]] = True
    return found
