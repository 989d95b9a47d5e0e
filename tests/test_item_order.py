"""The order in which the Hopper forward takes query tiles where each worker gets few: its kernel, interpreted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.kernels_pallas_gpu.triton_item_order import longest_first


@pytest.mark.parametrize(
    ("lists", "batch", "heads"), [((1, 3, 7), 1, 3), ((2, 4, 5), 2, 4), ((1, 2, 9), 2, 6), ((2, 1, 3), 2, 5)]
)
def test_the_longest_of_all_heads_comes_first(lists, batch, heads):
    list_batch, list_heads, _ = lists
    lengths = np.random.default_rng(0).integers(0, 6, lists)
    row_ptr = np.concatenate([np.zeros((*lists[:2], 1)), lengths.cumsum(-1)], -1).astype(np.int32)
    with xsake.interpret():
        order, zero = longest_first(jnp.asarray(row_ptr), batch=batch, heads=heads)
    of_tiles = lengths.repeat(batch // list_batch, 0).repeat(heads // list_heads, 1).reshape(-1)
    assert np.asarray(order)[:-1].tolist() == np.argsort(-of_tiles, kind="stable").tolist()
    assert np.asarray(zero).tolist() == [0]
