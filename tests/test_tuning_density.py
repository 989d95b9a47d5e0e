"""A mask's density reaches the look-up of tuned configurations, also where its blocks are chosen while tracing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hads_case import random_inputs, random_profile
from sweep import sweep

import xsake
from xsake import hads, tuning_db
from xsake._op import tuned
from xsake.hads.profile.rule import TRAINING
from xsake.hads.selection.mask_function import mask_shape
from xsake.tuning_db import Database, Entry, Key

LENGTH = 1024
PROFILE = random_profile(block=16)
CHUNKS = {1.0: 1, 0.5: 50, 0.25: 25, 0.125: 12, 0.0625: 6}  # by the bucket of density; 0.1 lies in that of 0.0884
KEYS = {
    density: Key.of(
        implementation="xla",
        direction="forward",
        dtype="float32",
        head_dim=8,
        value_dim=8,
        group=2,
        block_q=16,
        block_kv=16,
        causal=True,
        q_len=LENGTH,
        kv_len=LENGTH,
        heads=4,
        density=density,
    )
    for density in (*CHUNKS, 0.1)
}
TUNED = Database(
    "cpu",
    [
        Entry(KEYS[density], {"q": 16, "kv": 16, "chunk": chunk}, {"source": "measured"})
        for density, chunk in (CHUNKS | {0.1: 10}).items()
    ],
)


def found_for(make_mask, *arrays) -> tuple[float | None, int]:
    """(density of the key that is looked up, chunk of the entry that is found) for a mask made while tracing."""
    heard = []

    def listen(name, call):
        heard.append((tuned.key_of(name, call, "forward").density, tuned.choose(name, call).config.forward.chunk))

    def attend(query, key, *arrays):
        return xsake.attention(query, key, key, make_mask(query, key, *arrays))

    query, key = random_inputs(0, LENGTH, PROFILE)
    with tuning_db.overlay(TUNED), tuned.listening(listen):
        jax.eval_shape(attend, query, key, *arrays)
    return heard[0]


ENTRIES = [(budget, chunk, t) for t in (False, True) for budget, chunk in ((1.0, 1), (0.5, 50), (0.26, 25), (0.1, 10))]


@pytest.mark.parametrize("of", sweep(ENTRIES, slow=[ENTRIES[n] for n in (0, 1, 2, 4, 5, 7)]), ids=str)
def test_a_hads_mask_finds_the_entry_of_its_density(of):
    """For a mask for inference, and for a mask for training."""
    budget, chunk, transpose = of
    mask_fn = hads.HadsMask.of(PROFILE, budget, LENGTH, transpose=transpose)
    assert found_for(lambda query, key, mask_fn: mask_fn(0, query, key), mask_fn)[1] == chunk


@pytest.mark.parametrize("mode", sweep(["exact", "elastic", "static"], slow=["static"]))
def test_a_float_budget_is_the_density(unchecked_annotations, mode):
    assert found_for(lambda q, k: hads.select(q, k, PROFILE, 0.1, layer=0, mode=mode)) == (KEYS[0.1].density, 10)
    assert found_for(lambda q, k: hads.select(q, k, PROFILE, 1, layer=0, mode=mode))[1] == 1, "an int, too"


def test_counts_find_the_entry_of_the_density_that_is_given_with_them():
    counts = jnp.asarray(hads.layer_counts(PROFILE, 0.1, LENGTH))

    def chosen(**hint):
        return found_for(lambda q, k, counts: hads.select(q, k, PROFILE, counts, layer=1, **hint), counts)

    assert chosen(density_hint=0.1)[1] == 10
    assert chosen(density_hint=0.095)[1] == 10, "hints are put in buckets"
    assert chosen() == (None, 50), "what is unknown is taken for half"
    for wrong in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"density_hint=.* must be above 0 and at most 1"):
            chosen(density_hint=wrong)


def test_room_for_few_blocks_bounds_an_unknown_density():
    """Lists that have room for a quarter of the blocks cannot be denser than that."""
    side = LENGTH // 16
    every = side * (side + 1) // 2

    def chosen(capacity: int):
        def mask(q, k, blocks):
            sizes = dict(block_q=16, block_kv=16, q_len=LENGTH, kv_len=LENGTH, is_causal=True)
            return xsake.BlockMask.from_blocks(blocks, capacity=capacity, **sizes)

        return found_for(mask, np.zeros((4, side, side), bool))

    assert chosen(every) == (None, 50)
    assert chosen(int(0.6 * every)) == (None, 50)
    assert chosen(every // 4) == (0.25, 25)
    assert chosen(every // 10) == (KEYS[0.1].density, 10)


def test_budgets_of_one_bucket_share_a_program():
    a, b, c = (hads.HadsMask.of(PROFILE, budget, LENGTH) for budget in (0.25, 0.26, 0.5))
    assert jax.tree.structure(a) == jax.tree.structure(b) != jax.tree.structure(c)


def test_the_shape_of_a_mask_function_has_its_density():
    trained = dataclasses.replace(PROFILE, digests=(), length=LENGTH, model="in training", rule=TRAINING)
    made = hads.HadsMask.of(trained, 0.1, LENGTH)
    shape = mask_shape(budget=0.1, block=16, length=LENGTH, layers=2, q_heads=4, kv_heads=2, head_dim=8)
    assert jax.tree.structure(shape) == jax.tree.structure(made)
