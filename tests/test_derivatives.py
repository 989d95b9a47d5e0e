"""Derivatives other than gradients: forward over reverse in plain XLA; the others are refused in one line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import normal
from sweep import sweep

import xsake
from xsake.kernels_xla_ref import oracle

T, H, D = 7, 2, 4
MASK = xsake.BlockMask.from_blocks(
    np.array([[1, 0], [0, 1]], bool), block_q=4, block_kv=4, q_len=T, kv_len=T, is_causal=True
)
ARGUMENTS = {
    "mask": dict(mask=MASK),
    "bias and soft cap": dict(
        is_causal=True,
        bias=jnp.asarray(np.linspace(-1, 1, T, dtype=np.float32).reshape(1, 1, 1, T)),
        logits_soft_cap=2.0,
    ),
    "sinks and empty rows": dict(sinks=jnp.array([0.3, -0.4]), query_seq_lengths=jnp.array([5])),
}


def inputs():
    return tuple(normal(i, (1, T, H, D)) for i in range(3))


def loss(attention, **arguments):
    weight = normal(9, (1, T, H, D))

    def of(inputs):
        out, lse = attention(*inputs, **arguments, return_lse=True)
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    return of


@pytest.mark.parametrize("name", sweep(ARGUMENTS, slow=["mask", "bias and soft cap"]))
@pytest.mark.slow  # a Hessian times a vector takes the same derivatives
def test_hessian(name):
    arguments = ARGUMENTS[name]
    found = jax.jit(jax.hessian(loss(xsake.attention, **arguments, implementation="xla")))(inputs())
    expected = jax.jit(jax.hessian(loss(oracle.attention, **arguments)))(inputs())
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("name", sweep(["mask", "bias and soft cap"], slow=["bias and soft cap"]))
def test_hessian_times_a_vector(name):
    x, direction = inputs(), inputs()[::-1]

    def product(attention):
        gradient = jax.grad(loss(attention, **ARGUMENTS[name]))
        return jax.jit(lambda x, direction: jax.jvp(gradient, (x,), (direction,)))(x, direction)

    found, expected = product(xsake.attention), product(oracle.attention)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), found, expected)


REVERSE_TWICE = {
    "grad of grad": lambda f: jax.grad(lambda x: sum(jnp.sum(g) for g in jax.grad(f)(x))),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "of a compiled grad": lambda f: jax.jacrev(jax.jit(jax.grad(f))),
    "of a checkpoint": lambda f: jax.jacrev(jax.grad(jax.checkpoint(f))),
}


@pytest.mark.parametrize("name", sweep(REVERSE_TWICE, slow=["jacrev of jacrev"]))
def test_reverse_over_reverse_is_refused(name):
    with pytest.raises(NotImplementedError, match=r"no second derivatives in reverse mode.*jax\.hessian.*oracle"):
        jax.jit(REVERSE_TWICE[name](loss(xsake.attention, implementation="xla")))(inputs())


@pytest.mark.parametrize("second", [jax.hessian, lambda f: jax.jacrev(jax.grad(f))])
def test_kernels_have_no_second_derivatives(second):
    with xsake.interpret(), pytest.raises(NotImplementedError, match=r"'triton' has no second derivatives.*'xla'"):
        second(loss(xsake.attention, implementation="triton"))(inputs())


FORWARD = {
    "jacfwd": jax.jacfwd,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "compiled jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))),
    "jvp of a compiled call": lambda f: lambda x: jax.jvp(jax.jit(f), (x,), (x,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
    "mapped, in a loop": lambda f: jax.jit(
        lambda x: jax.jvp(lambda x: jax.lax.map(jax.vmap(f), jax.tree.map(lambda y: y[None, None], x)), (x,), (x,))
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused(name):
    with pytest.raises(TypeError, match=r"no forward-mode derivative: use jax\.grad.*oracle"):
        FORWARD[name](loss(xsake.attention))(inputs())
