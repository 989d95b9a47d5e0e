"""The blocks that answers hang on, against attention weights in numpy."""

from __future__ import annotations

import hads_case as case
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.hads.study.carried import MUCH, asking, carried, most_asking
from xsake.hads.study.summary import dropped
from xsake.hads.study.texts import Text

LENGTH = 250


@pytest.mark.parametrize("profile", [case.random_profile(), case.random_profile(block=8, block_q=32)])
def test_blocks_that_hold_much_of_an_asking_query_are_counted(profile):
    grid = profile.grid(LENGTH)
    query, key = case.random_inputs(0, LENGTH, profile, batch=2)
    query *= 4  # sharp
    asked = np.array([[200, 249, -1], [30, 130, 240]], np.int32)
    kept = np.random.default_rng(1).random((2, 4, grid.rows, grid.columns)) < 0.5
    weights = case.dense_weights(query, key)
    by_block = np.add.reduceat(weights, np.arange(0, LENGTH, profile.block), -1)
    wanted = np.zeros((2, 2), int)
    for b, h, n in np.ndindex(2, 4, 3):
        if asked[b, n] < 0:
            continue
        row = asked[b, n] // profile.block_q
        much = (by_block[b, h, asked[b, n]] >= MUCH) & ~grid.forced()[row]
        wanted[b] += much.sum(), (much & ~kept[b, h, row]).sum()
    assert (wanted > 0).all()
    np.testing.assert_array_equal(carried(*map(jnp.asarray, (query, key, kept)), asked, grid), wanted)


def test_a_text_asks_where_an_answer_follows():
    items = np.array([0, 0, 1, 1, 0, 2], np.int32)
    texts = [Text("a", "needles", np.zeros(6, np.int32), items), Text("b", "plain", np.zeros(6, np.int32))]
    assert asking(texts, most_asking(texts)).tolist() == [[2, 3, 5], [-1, -1, -1]]


def test_what_is_dropped_is_a_share_of_all_carriers():
    line = {"domain": "needles", "method": "hads", "budget": 0.1, "asked": 2, "carriers": 30, "dropped": 3}
    assert dropped([line, line | {"carriers": 10, "dropped": 5}, {"method": "hads"}]) == [
        ("needles", "hads", 0.1, 40, 0.2)
    ]
