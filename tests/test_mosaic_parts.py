"""The order in which CTAs take the columns of the backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.autotune.workloads import WORKLOADS, Workload
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import RowLists
from xsake.kernels_pallas_gpu.hopper.work.parts import Columns

LLAMA = WORKLOADS["llama32k"]


@pytest.mark.parametrize("early, parts", [(0, 1), (3, 1), (3, 4), (9, 2)])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_every_part_of_every_column_has_one_cta(early: int, parts: int, interleaved: bool | None):
    columns = Columns(pairs=5, section=2, ranks=9, early=early, parts=parts)
    ctas = jnp.arange(columns.ctas, dtype=jnp.int32)
    flag = None if interleaved is None else jnp.array([interleaved], jnp.int32)
    found = jax.vmap(lambda cta: jnp.stack(columns.place(cta, flag)))(ctas)
    pair, rank = np.meshgrid(np.arange(5), np.arange(9), indexing="ij")
    wanted = [(p, r, n) for p, r in zip(pair.flat, rank.flat, strict=True) for n in range(parts if r < early else 1)]
    assert sorted(map(tuple, np.asarray(found).tolist())) == sorted(wanted)
    if interleaved:
        assert (np.diff(np.asarray(found)[:, 1]) >= 0).all()


def lines(density: float, length: int) -> xsake.BlockMask:
    """A sink, a window and vertical lines."""
    n = length // 128
    row, column = np.arange(n)[:, None], np.arange(n)[None]
    chosen = np.random.default_rng(0).random(n) < density
    blocks = (column == 0) | (row - column < 4) | chosen[None]
    blocks &= column <= row
    return xsake.BlockMask.from_blocks(
        blocks[None], block_q=128, block_kv=128, q_len=length, kv_len=length, is_causal=True
    )


def decides(mask: xsake.BlockMask, workload: Workload) -> bool:
    pairs = workload.batch * workload.kv_heads
    columns = Columns(pairs=pairs, section=1, ranks=mask.kv_len // 128)
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    flag = columns.interleaved(lists, workload.batch)
    assert flag is not None and flag.shape == (1,)
    return bool(flag[0])


def test_pairs_are_interleaved_where_long_columns_are_much_of_the_work():
    assert all(decides(lines(density, LLAMA.length), LLAMA) for density in (0.1, 0.2, 0.4))
    assert not any(decides(LLAMA.mask(density), LLAMA) for density in (0.1, 0.43, 1.0))


def test_one_section_needs_no_choice():
    mask = LLAMA.mask(0.1)
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    assert Columns(pairs=8, section=8, ranks=256).interleaved(lists, 1) is None
