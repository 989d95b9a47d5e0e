"""The counter of executed work: what tests of cost rely on instead of a clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from executed import counting_matmul_flops

X = jnp.ones((4, 4))
PRODUCT = 2 * 4**3


def test_loops_count_as_often_as_they_go_round():
    def power(x, n):
        return jax.lax.fori_loop(0, n, lambda _, y: jax.jit(jnp.matmul)(y, x), x)

    count = counting_matmul_flops(power)
    assert [int(count(X, n)) for n in (0, 1, 3)] == [0, PRODUCT, 3 * PRODUCT]


def test_branches_count_if_they_are_taken_and_what_is_discarded_counts():
    count = counting_matmul_flops(lambda x, on: jax.lax.cond(on, lambda x: x @ x @ x, lambda x: x, x))
    assert [int(count(X, on)) for on in (True, False)] == [2 * PRODUCT, 0]
    count = counting_matmul_flops(lambda x, on: jnp.where(on, x @ x, x))
    assert [int(count(X, on)) for on in (True, False)] == [PRODUCT, PRODUCT]


def test_scans_count_every_step():
    count = counting_matmul_flops(lambda x: jax.lax.scan(lambda y, _: (jax.jit(jnp.matmul)(y, x), None), x, length=5))
    assert int(count(X)) == 5 * PRODUCT
