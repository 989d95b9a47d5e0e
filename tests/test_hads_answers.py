"""Conversations: the rows before earlier answers are chosen as a prompt's last rows are."""

from __future__ import annotations

import dataclasses
from functools import partial

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import hads
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.rows import Rows
from xsake.model import HadsBudget, generate
from xsake.model.generation.prefill import read_prompts

LENGTHS, ANSWERS = [121, 86], [[40, 77], [50]]
PADDED = np.array([[40, 77], [50, 0]], np.int32)
PROFILE = case.random_profile()


@pytest.fixture(scope="module")
def inputs():
    return tuple(jnp.asarray(x) for x in case.random_inputs(5, LENGTHS[0], PROFILE, batch=2))


def test_masses_are_exact_before_answers(inputs):
    query, key = inputs
    grid = PROFILE.grid(LENGTHS[0])
    rows = Rows(grid, 0, jnp.array(LENGTHS, jnp.int32), jnp.asarray(PADDED))
    got = jax.jit(lambda query, key: layer_mass(query, key, PROFILE.estimator(1), rows))(query, key)
    for n, length in enumerate(LENGTHS):
        alone = np.asarray(query)[n : n + 1, :length], np.asarray(key)[n : n + 1, :length]
        wanted = case.dense_mass(*alone, PROFILE, 1, tuple(ANSWERS[n]))
        side = wanted.shape[-1]
        np.testing.assert_allclose(got[n : n + 1, :, :side, :side], wanted, rtol=1e-3, atol=1e-6)


def test_errors_in_the_rows_before_answers_count_more():
    rule = Rule(last_rows=2, last_weight=4.0, exact_queries=0)
    grid = dataclasses.replace(PROFILE, rule=rule).grid(LENGTHS[0])
    assert grid.row_weights(ANSWERS[0]).tolist() == [1, 4, 4, 4, 4, 1, 4, 4]
    rows = Rows(grid, 2, jnp.array(LENGTHS, jnp.int32), jnp.asarray(PADDED))
    assert rows.weights()[:, 0, :, 0].tolist() == [[4, 4, 4, 1, 4, 4], [4, 4, 4, 4, 1, 1]]


def test_errors_in_exact_rows_count_more():
    rule = Rule(last_rows=0, last_weight=4.0, exact_queries=20)
    rows = Rows(dataclasses.replace(PROFILE, rule=rule).grid(LENGTHS[0]), 0, jnp.int32(LENGTHS), jnp.asarray(PADDED))
    ends = [(length, *answers) for length, answers in zip(LENGTHS, ANSWERS, strict=True)]
    row = 16 * np.arange(rows.number)
    last = [np.any([(row < end) & (row + 16 > end - 20) for end in some], 0).tolist() for some in ends]
    assert rows.last()[:, 0, :, 0].tolist() == last
    assert rows.grid.last_rows(ANSWERS[0]).tolist() == last[0]


def test_budgets_are_exact_with_answers(inputs):
    (query, key), chunk = inputs, 64
    counts = hads.chunk_counts(PROFILE, 0.8, LENGTHS, chunk, ANSWERS)
    wanted = [hads.layer_counts(PROFILE, 0.8, length)[1] for length in LENGTHS]
    assert counts[:, 1].sum(0).tolist() == wanted
    pooled = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=8, head_dim=8)
    pooled = pooled.write(key, jnp.array(LENGTHS, jnp.int32), start=0, block=16)
    weights, options = hads.LayerWeights.of(PROFILE, 1), dict(block=16, rule=PROFILE.rule)
    for number, start in enumerate(range(0, LENGTHS[0], chunk)):
        given = query[:, start : start + chunk], key, pooled, weights, counts[number, 1], np.int32(LENGTHS)
        run = jax.jit(partial(hads.select_chunk, start=start, **options))
        blocks = run(*given, answers=PADDED).to_blocks()
        assert blocks.sum((1, 2, 3)).tolist() == counts[number, 1].tolist()


def test_answers_of_a_model():
    """What is read depends on where answers are said to be, and wrong places are refused."""
    model, hads_budget = case.one_layer(), HadsBudget(case.ONE_LAYER, 0.7, policy="always")
    read = partial(read_prompts, model, case.PROMPTS, capacity=256, hads=hads_budget)
    last, none = read(answers=[[60, 100], []]).last, read(answers=[[], []]).last
    assert jnp.array_equal(none, read().last) and not jnp.array_equal(last[0], none[0])
    assert jnp.array_equal(last[1], none[1])
    for answers, why in (
        ([[1]], "answers of 1 prompts are given, and 2 prompts"),
        ([[], [203]], "answers of prompt 1 begin at 203: it must be an int from 1 to 202"),
        ([[0], []], "answers of prompt 0 begin at 0"),
    ):
        with pytest.raises(ValueError, match=why):
            generate(model, case.PROMPTS, max_new_tokens=1, hads=hads_budget, answers=answers)
    with pytest.raises(ValueError, match="give hads, or leave answers out"):
        generate(model, case.PROMPTS, max_new_tokens=1, answers=[[], []])
