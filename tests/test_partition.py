"""Arrays that lie on a mesh: every device computes its part of the batch and of the heads, by `jax.jit` alone."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import chances, integers, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweep import sweep
from targets import XLA

import xsake
from xsake.kernels_xla_ref import oracle
from xsake.testing.case import attend, check, collect, make, with_grads

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
def test_arrays_on_no_mesh_under_set_mesh(kind):
    """They are whole on every device; what the function itself cuts is cut as it says."""
    case = make(XLA, q_len=33, batch=2, q_heads=4, kv_heads=4, mask=(1, 4), mask_causal=True)
    inputs, mask = jax.tree.map(jnp.array, (case.inputs, case.mask()))

    def grads(inputs):
        return jax.grad(lambda x: jnp.sum(xsake.attention(**x, mask=mask) ** 2))(inputs)

    def cut(x):
        return jax.lax.with_sharding_constraint(x, P("data")) if kind == "auto" else jax.sharding.reshard(x, P("data"))

    want = dense(**inputs, mask=mask)
    wanted = jax.jit(jax.grad(lambda x: jnp.sum(oracle.attention(**x, mask=mask) ** 2)))(inputs)
    with jax.set_mesh(mesh_of(kind)):
        outs = [
            xsake.attention(**inputs, mask=mask),
            jax.jit(lambda inputs: xsake.attention(**jax.tree.map(cut, inputs), mask=mask))(inputs),
        ]
        found = grads(inputs)
    for out in outs:
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, wanted)


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
    q = normal(0, (1, 32, 12, 16))
    k = normal(1, (1, 32, 6, 16))
    sharded = jax.device_put(q, NamedSharding(mesh, P(None, None, "model", None)))
    replicated = jax.device_put(k, NamedSharding(mesh, P()))
    with pytest.warns(UserWarning, match="sharded along heads: cut batch and heads"):
        out = jax.jit(xsake.attention)(sharded, replicated, replicated)
    np.testing.assert_allclose(out, dense(q, k, k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", sweep(KINDS, slow=["auto"]))
def test_a_mask_that_was_made_inside_jit_follows(kind):
    mesh = mesh_of(kind)
    q = normal(0, (2, 64, 4, 16))
    blocks = chances(1, (2, 4, 4, 4), 0.6)

    def made(blocks):
        options = dict(block_q=16, block_kv=16, q_len=64, kv_len=64, is_causal=True, capacity=10)
        return xsake.BlockMask.from_blocks(blocks, **options)

    place = NamedSharding(mesh, P("data", None, "model", None))
    given = jax.device_put(blocks, NamedSharding(mesh, P("data", "model", None, None)))
    got = jax.jit(lambda q, blocks: xsake.attention(q, q, q, made(blocks)))(jax.device_put(q, place), given)
    np.testing.assert_allclose(got, dense(q, q, q, made(blocks)), rtol=1e-5, atol=1e-5)


LENGTH = 32
BLOCKS = dict(block_q=8, block_kv=8, q_len=LENGTH, kv_len=LENGTH)


def indices(i, n=2, heads=4):
    return integers(i, -1, LENGTH // 8, (2, heads, LENGTH // 8, n))


def with_sinks(q, k, v, sinks):
    return xsake.attention(q, k, v, sinks=sinks, return_lse=True)


def with_constant_sinks(q, k, v, sinks):
    return xsake.attention(q, k, v, sinks=jax.lax.stop_gradient(sinks))


def with_indices(q, k, v, i):
    return xsake.attention(q, k, v, xsake.BlockMask.from_indices(i, **BLOCKS))


def with_a_capacity(q, k, v, blocks):
    return xsake.attention(q, k, v, xsake.BlockMask.from_blocks(blocks, capacity=15, **BLOCKS))


def with_a_union(q, k, v, i, blocks):
    mask = xsake.BlockMask.from_indices(i, **BLOCKS) | xsake.BlockMask.from_blocks(blocks, capacity=15, **BLOCKS)
    return xsake.attention(q, k, v, mask)


def with_segments(q, k, v, segments, lengths):
    return xsake.attention(q, k, v, segment_ids=segments, key_value_seq_lengths=lengths)


def selected(q, k, v, i, sinks):
    return xsake.selected_attention(q, k, v, i.swapaxes(1, 2).repeat(8, 1), block_size=8, window=5, sinks=sinks)


def moba(q, k, v):
    return xsake.moba_attention(q, k, v, block_size=8, num_selected=2)


def moba_of_sequences(q, k, v):
    return xsake.moba_attention(q[:1], k[:1], v[:1], block_size=8, num_selected=2, cu_seqlens=jnp.array([0, 11, 30]))


def native_sparse(q, k, v, gate):
    options = dict(block_size=8, num_selected=2, window=5)
    return xsake.native_sparse_attention(q, k, v, gate_compressed=gate, gate_window=gate, **options)


def mapped(q, k, v, sinks):
    return jax.vmap(lambda q, sinks: xsake.attention(q, k, v, sinks=sinks))(jnp.stack([q, 2 * q, -q]), sinks)


def drawn(*shape):
    return normal(7, shape)


SEGMENTS = tuple(map(jnp.asarray, (np.arange(LENGTH, dtype=np.int32)[None].repeat(2, 0) // 12, np.int32([32, 20]))))
SOME = chances(3, (2, 8, LENGTH // 8, LENGTH // 8), 0.6)
# function, arguments besides query, key and value, and how these lie
EXPLICIT = {
    "sinks": (with_sinks, (drawn(8),), (P(),)),
    "several sinks per head, cut": (with_sinks, (drawn(8, 3),), (P("model"),)),
    "constant sinks": (with_constant_sinks, (drawn(8, 3),), (P(),)),
    "indices": (with_indices, (indices(1),), (P(),)),
    "indices cut over the batch": (with_indices, (indices(1),), (P("data"),)),
    "indices of fewer heads": (with_indices, (indices(1, heads=1),), (P("data"),)),
    "a capacity": (with_a_capacity, (SOME,), (P("data", "model"),)),
    "a union": (with_a_union, (indices(1, heads=8), SOME), (P("data"), P(None, "model"))),
    "tokens cut over the axis of the heads": (with_segments, SEGMENTS, (P(None, "model"), P("data"))),
    "mapped": (mapped, (drawn(3, 8),), (P(),)),
    "selected": (selected, (indices(2), drawn(8)), (P("data", "model"), P())),
    "moba": (moba, (), ()),
    "moba of sequences": (moba_of_sequences, (), ()),
    "native sparse": (native_sparse, (drawn(2, LENGTH, 8),), (P("data", None, "model"),)),
}
QUICK = ("a union", "tokens cut over the axis of the heads", "mapped", "moba")


def differentiated(function, arrays):
    """The results, and all gradients of floats by random cotangents."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def of_floats(*given):
        given = iter(given)
        return function(*(next(given) if is_float else x for is_float, x in zip(floats, arrays, strict=True)))

    results, back = jax.vjp(of_floats, *(x for is_float, x in zip(floats, arrays, strict=True) if is_float))
    cotangents = jax.tree.map(lambda x: jnp.cos(3 * jax.lax.stop_gradient(x) + 1), results)
    return results, back(cotangents)


@pytest.mark.filterwarnings("ignore:xsake.attention gathers arrays")
@pytest.mark.parametrize("axes", sweep({"batch": (2, 1), "heads": (1, 4), "both": (2, 4)}, slow=["batch", "heads"]))
@pytest.mark.parametrize("name", sweep(EXPLICIT, slow=[name for name in EXPLICIT if name not in QUICK]))
def test_gradients_on_explicit_axes(name, axes):
    function, rest, specs = EXPLICIT[name]
    arrays = (
        *(normal(i, (2, LENGTH, heads, 8)) for i, heads in enumerate((8, 4, 4))),
        *rest,
    )
    mesh = mesh_of("explicit", {"batch": (2, 1), "heads": (1, 4), "both": (2, 4)}[axes])
    specs = (P("data", None, "model"),) * 3 + specs
    if name == "moba of sequences":
        specs = (P(None, None, "model"),) * 3
    laid = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    run = jax.jit(lambda *arrays: differentiated(function, arrays))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(*laid), run(*arrays))


def test_vmap_over_an_axis_that_cuts_the_arrays():
    """JAX takes the axis away from what is mapped: attention and masks there are cut over the other axes alone."""
    mesh = mesh_of("explicit", (2, 2))
    q, numbers = drawn(4, 1, 32, 2, 8), np.array([[[0], [1]], [[0], [0]]], np.int32)[[0, 1, 1, 0], None, None]

    def one(q, numbers):
        mask = xsake.BlockMask.from_indices(numbers, block_q=16, block_kv=16, q_len=32, kv_len=32)
        return xsake.attention(q, q, q, mask)

    run = jax.jit(jax.value_and_grad(lambda q, numbers: (jax.vmap(one)(q, numbers) ** 2).sum()))
    expected = run(q, numbers)
    with jax.set_mesh(mesh):
        places = (NamedSharding(mesh, spec) for spec in (P("data", None, None, "model"), P("data")))
        found = run(*map(jax.device_put, (q, numbers), places))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)


def test_views_of_a_mask_that_is_made_on_explicit_axes():
    def views(blocks, chosen):
        mask = xsake.BlockMask.from_blocks(blocks, capacity=15, **BLOCKS)
        of_tokens = xsake.BlockMask.from_token_indices(chosen.swapaxes(1, 2).repeat(8, 1), block_q=8, block_kv=8)
        return (
            mask.to_blocks(),
            mask.density(per_head=True),
            of_tokens.to_elements(),
            mask.shard_rows(2).blocks_walked(),
        )

    mesh = mesh_of("explicit")
    laid = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in (SOME, indices(1))]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(views)(*laid), jax.jit(views)(SOME, indices(1)))


def test_heads_that_choose_together_are_gathered_where_devices_would_part_them():
    q, k = (normal(heads, (1, 16, heads, 8)) for heads in (8, 2))
    mesh = mesh_of("explicit", (4,), ("model",))
    cut = jax.device_put(q, NamedSharding(mesh, P(None, None, "model")))
    whole = jax.device_put(k, NamedSharding(mesh, P()))
    run = jax.jit(lambda q, k: xsake.native_sparse_attention(q, k, k, block_size=8, num_selected=2))
    with pytest.warns(UserWarning, match="along heads over the mesh axes model: 4 devices cannot divide 2 and 8 heads"):
        got = run(cut, whole)
    np.testing.assert_allclose(got, run(q, k), rtol=1e-5, atol=1e-5)


def test_the_flax_adapter_is_cut_too():
    from flax import nnx

    from xsake.model import attention_fn

    mesh = mesh_of("auto", (4,), ("model",))
    layer, plain = (
        nnx.MultiHeadAttention(4, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
        for attend in (attention_fn, nnx.dot_product_attention)
    )
    x = jnp.ones((2, 32, 64)) * normal(0, (2, 32, 64))
    state = nnx.state(layer)
    cut = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(mesh, P(None, "model") if p.ndim > 1 else P())), state)
    graph = nnx.graphdef(layer)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    np.testing.assert_allclose(run(cut, x), jax.jit(plain)(x), rtol=1e-4, atol=1e-5)
