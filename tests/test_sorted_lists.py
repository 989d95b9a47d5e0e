"""Lists that are sorted from what tokens chose, against those that are made from dense arrays of blocks."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from drawn_mask import LISTS
from sweep import sweep

from xsake import BlockMask
from xsake.hads.mask import token_selection
from xsake.hads.mask.lists import chosen

SIZES = {  # batch, heads, queries, keys, numbers per token; options of the mask
    "several heads": (2, 3, 37, 37, 4, dict(block_q=4, block_kv=8, is_causal=True)),
    "no rule": (1, 2, 70, 45, 3, dict(block_q=8, block_kv=5)),
    "two words per block": (1, 1, 200, 200, 3, dict(block_q=64, block_kv=32, is_causal=True)),
    "a window": (2, 1, 64, 80, 3, dict(block_q=3, block_kv=16, local_window_size=(17, 5))),
    "an overflow": (2, 2, 48, 48, 3, dict(block_q=8, block_kv=4, capacity=40)),
    "one query per block": (1, 1, 9, 20, 2, dict(block_q=1, block_kv=2, is_causal=True, capacity=100)),
}


def selections(b, h, t, s, n, block_q, block_kv, **_):
    """Random numbers, with -1 and repeats; then blocks that all rows chose, empty rows; then nothing at all."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-1, -(-s // block_kv), (b, t, h, n), np.int32)
    yield numbers, rng.integers(0, n + 2, (b, t, h)).astype(np.int32)
    together = np.repeat(numbers[:, ::block_q], block_q, axis=1)[:, :t]
    together[..., -1] = numbers[..., -1]
    together[:, block_q : 2 * block_q] = -1
    yield together, np.full((b, t, h), n, np.int32)
    yield np.full_like(numbers, -1), np.full((b, t, h), n, np.int32)
    numbers[0, 0, 0, 0] = -(-s // block_kv)  # out of range
    yield numbers, np.full((b, t, h), n, np.int32)


CASES = {f"{name}, {way}": (name, way) for name in SIZES for way in ("flat", "head by head")}
QUICK = ("several heads, flat", "two words per block, flat")  # other tests of selections go head by head


@pytest.mark.parametrize("case", sweep(CASES, slow=CASES.keys() - QUICK))
def test_sorted_lists_are_the_dense_ones(monkeypatch, case):
    name, way = CASES[case]
    *sizes, options = SIZES[name]

    def masks(numbers, counts):
        def mask():
            return BlockMask.from_token_indices(numbers, counts, kv_len=sizes[3], **options)

        with monkeypatch.context() as patch:
            patch.setattr(token_selection, "_sorting_pays", lambda *_: True)
            patch.setattr(chosen, "jit_may_partition", lambda: way == "head by head")
            by_sorting = mask()
            patch.setattr(token_selection, "sorted_lists", lambda *_: None)
            return by_sorting, mask()

    masks = jax.jit(masks)
    for drawn in selections(*sizes, **options):
        got, expected = jax.device_get(masks(*drawn))
        for field in LISTS:
            np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), err_msg=field)
        if not got.overflowed().any():
            for ptr in ("kv", "q"):
                np.testing.assert_array_equal(words(got, ptr), words(expected, ptr))


def words(mask, direction):
    """The words of all listed blocks, head after head."""
    number, ptr = getattr(mask, f"{direction}_bitmap"), getattr(mask, f"{direction}_row_ptr")
    lead = np.ndindex(mask.batch, mask.heads)
    return np.concatenate([mask.bitmaps[at][number[at][: ptr[at][-1]], 0] for at in lead])


def test_memory_grows_with_what_is_chosen(monkeypatch):
    """No array has an entry for each of the 8192 x 1024 blocks of 4 heads."""
    monkeypatch.setattr(chosen, "jit_may_partition", lambda: False)
    numbers = jax.ShapeDtypeStruct((1, 65536, 4, 16), np.int32)
    make = jax.jit(lambda x: BlockMask.from_token_indices(x, block_q=8, block_kv=64, is_causal=True))
    shapes = re.findall(r"tensor<([\dx]+)x\w+>", make.lower(numbers).as_text())
    assert max(math.prod(map(int, shape.split("x"))) for shape in shapes) <= math.prod(numbers.shape) + 1
