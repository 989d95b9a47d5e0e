"""Arrays that lie on a mesh: every device computes its part of the batch and of the heads, by `jax.jit` alone."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.case import attend, check, collect, make, with_grads
from contract.target import XLA
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweep import sweep

import xsake
from xsake.kernels_xla_ref import oracle

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# (query heads, K/V heads, heads of the mask); the mesh has 4 devices along the heads.
HEADS = {
    "grouped": (8, 4, 8),
    "fewer K/V heads than devices": (8, 2, 2),
    "one K/V head": (4, 1, 1),
}
COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def mesh_of(kind, shape=(2, 4), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def specs_of(case, heads="model", kv_heads="model"):
    q, kv = P("data", None, heads, None), P("data", None, kv_heads, None)
    return dict(query=q, key=kv, value=kv, bias=P(None, heads, None, None), sinks=P(heads))


def laid(mesh, tree, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}


def everything(case, mask, rest):
    def run(inputs, cotangents):
        return with_grads(lambda x: attend(XLA, x, mask, rest, **case.options), inputs, cotangents)

    return run


# What one device gives, by the oracle: it compiles in a fraction of the time of a block-sparse program.
dense = jax.jit(oracle.attention)

WHICH = [f"{kind}: {heads}" for kind in KINDS for heads in HEADS]


@pytest.mark.parametrize(
    "which",
    sweep(
        WHICH,
        slow=[name for name in WHICH if name not in ("auto: grouped", "explicit: one K/V head")],
    ),
)
def test_each_device_computes_its_part(which):
    kind, heads = which.split(": ")
    q_heads, kv_heads, mask_heads = HEADS[heads]
    case = make(
        XLA,
        q_len=39,
        kv_len=70,
        q_heads=q_heads,
        kv_heads=kv_heads,
        mask=(2, mask_heads) if kind == "auto" else (1, mask_heads),
        mask_causal=True,
        density=0.7,
        bias=(1, 0, 0, 0),
        sinks=(q_heads,),
        key_value_seq_lengths=np.array([70, 50], np.int32),
    )
    mesh = mesh_of(kind)
    specs = specs_of(case, kv_heads="model" if kv_heads % 4 == 0 else None)
    inputs = laid(mesh, case.inputs, specs)
    cotangents = (
        jax.device_put(case.cotangents[0], NamedSharding(mesh, specs["query"])),
        jax.device_put(case.cotangents[1], NamedSharding(mesh, P("data", None, "model"))),
    )
    program = jax.jit(everything(case, case.mask(), case.rest)).lower(inputs, cotangents).compile()
    results, grads = program(inputs, cotangents)
    check(case, collect(case, results, grads))
    assert results[0].sharding.is_equivalent_to(NamedSharding(mesh, specs["query"]), 4)
    found = set(re.findall(COLLECTIVES, program.as_text()))
    assert found <= {"all-reduce"}, "only gradients of what devices share are summed; nothing is gathered"


@pytest.mark.parametrize("kind", KINDS)
def test_outside_jit(kind):
    case = make(XLA, q_len=33, q_heads=4, kv_heads=4, mask=(1, 4), mask_causal=True)
    mesh = mesh_of(kind, (4,), ("model",))
    spec = P(None, None, "model", None)
    inputs = laid(mesh, case.inputs, dict.fromkeys(case.inputs, spec))
    out = xsake.attention(**inputs, mask=case.mask())
    np.testing.assert_allclose(out, dense(**case.inputs, mask=case.mask()), rtol=1e-5, atol=1e-5)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_is_cut_is_gathered_with_a_warning(kind):
    case = make(XLA, q_len=64, q_heads=2, kv_heads=2, mask=None)
    mesh = mesh_of(kind, (4,), ("model",))
    inputs = laid(mesh, case.inputs, dict.fromkeys(case.inputs, P(None, "model", None, None)))
    with pytest.warns(UserWarning, match="gathers arrays that are sharded along the sequence.*sharded_attention"):
        out = jax.jit(lambda x: xsake.attention(**x))(inputs)
    np.testing.assert_allclose(out, dense(**case.inputs), rtol=1e-5, atol=1e-5)


def test_heads_that_cannot_be_cut_are_gathered_with_a_warning():
    mesh = mesh_of("explicit", (4,), ("model",))
    q = jax.random.normal(jax.random.key(0), (1, 32, 12, 16))
    k = jax.random.normal(jax.random.key(1), (1, 32, 6, 16))
    sharded = jax.device_put(q, NamedSharding(mesh, P(None, None, "model", None)))
    replicated = jax.device_put(k, NamedSharding(mesh, P()))
    with pytest.warns(UserWarning, match="sharded along heads: cut batch and heads"):
        out = jax.jit(xsake.attention)(sharded, replicated, replicated)
    np.testing.assert_allclose(out, dense(q, k, k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", sweep(KINDS, slow=["auto"]))
def test_a_mask_that_was_made_inside_jit_follows(kind):
    mesh = mesh_of(kind)
    q = jax.random.normal(jax.random.key(0), (2, 64, 4, 16))
    blocks = jax.random.uniform(jax.random.key(1), (2, 4, 4, 4)) < 0.6

    def made(blocks):
        options = dict(block_q=16, block_kv=16, q_len=64, kv_len=64, is_causal=True, capacity=10)
        return xsake.BlockMask.from_blocks(blocks, **options)

    place = NamedSharding(mesh, P("data", None, "model", None))
    # Explicit axes do not yet let a mask be made from blocks that are cut: they are given whole.
    given = (
        blocks if kind == "explicit" else jax.device_put(blocks, NamedSharding(mesh, P("data", "model", None, None)))
    )
    got = jax.jit(lambda q, blocks: xsake.attention(q, q, q, made(blocks)))(jax.device_put(q, place), given)
    np.testing.assert_allclose(got, dense(q, q, q, made(blocks)), rtol=1e-5, atol=1e-5)


def test_the_flax_adapter_is_cut_too():
    from flax import nnx

    from xsake.model import attention_fn

    mesh = mesh_of("auto", (4,), ("model",))
    layer, plain = (
        nnx.MultiHeadAttention(4, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
        for attend in (attention_fn, nnx.dot_product_attention)
    )
    x = jnp.ones((2, 32, 64)) * jax.random.normal(jax.random.key(0), (2, 32, 64))
    state = nnx.state(layer)
    cut = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(mesh, P(None, "model") if p.ndim > 1 else P())), state)
    graph = nnx.graphdef(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    np.testing.assert_allclose(run(cut, x), jax.jit(plain)(x), rtol=1e-4, atol=1e-5)
