"""`jax.export`: a symbolic batch size, and masks as arguments of a stored program."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from sweep import sweep

import xsake
from xsake.hads.mask import exported
from xsake.hads.mask.lists.mask_lists import STATIC

T, H, K, D = 40, 2, 1, 8
MASK = xsake.patterns.sink_window(T, T, sink=8, window=8, block_q=16, block_kv=16)


def arrays(batch, **more):
    rng = np.random.default_rng(0)
    shapes = {"query": (T, H, D), "key": (T, K, D), "value": (T, K, D)} | more
    return {name: jnp.asarray(rng.normal(size=(batch, *shape)), jnp.float32) for name, shape in shapes.items()}


def attend(inputs, mask):
    rest = dict(inputs)
    if "lengths" in rest:
        rest["key_value_seq_lengths"] = rest.pop("lengths")
    return xsake.attention(**rest, mask=mask, return_lse=True)


def loss_gradients(inputs, mask):
    floats = {k: v for k, v in inputs.items() if v.dtype == jnp.float32}
    rest = {k: v for k, v in inputs.items() if k not in floats}
    return jax.grad(lambda x: attend(x | rest, mask)[0].sum())(floats)


def stored(function, *arguments, **options):
    """The function after it was exported, written and read again."""
    return export.deserialize(export.export(jax.jit(function), **options)(*arguments).serialize())


def same(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6), actual, expected)


@pytest.mark.parametrize("function", sweep([attend, loss_gradients], slow=[loss_gradients]))
def test_symbolic_batch(function):
    (b,) = export.symbolic_shape("b")
    inputs = arrays(3) | {"lengths": jnp.array([40, 17, 1], jnp.int32), "bias": arrays(3, bias=(1, T, T))["bias"]}
    of_any_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), inputs)
    program = stored(function, of_any_batch, MASK)
    expected = jax.jit(function)(inputs, MASK)
    for size in (1, 3):  # of an example, whatever the others are
        given, of_these = (jax.tree.map(lambda x, size=size: x[:size], tree) for tree in (inputs, expected))
        same(program.call(given, MASK), of_these)


def test_symbolic_batch_with_a_mask_for_each_example():
    (b,) = export.symbolic_shape("b")
    masks = xsake.BlockMask.from_blocks(
        np.random.default_rng(1).random((3, H, 3, 3)) < 0.6, block_q=16, block_kv=16, q_len=T, kv_len=T
    )
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), (arrays(3), masks))
    program = stored(attend, *specs)
    same(program.call(arrays(3), masks), jax.jit(attend)(arrays(3), masks))


@pytest.mark.parametrize("name", ["query", "key and value"])
def test_symbolic_length_says_what_to_do(name):
    (t,) = export.symbolic_shape("t")
    inputs = arrays(2)
    for each in name.split(" and "):
        _, _, *rest = inputs[each].shape
        inputs[each] = jax.ShapeDtypeStruct((2, t, *rest), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"only the batch may be symbolic.*export a program for each length"):
        export.export(jax.jit(lambda x: xsake.attention(**x)))(inputs)


def test_a_kernel_refuses_a_symbolic_batch():
    (b,) = export.symbolic_shape("b")
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), arrays(1))
    with xsake.interpret(), pytest.raises(NotImplementedError, match="'triton': it does not honour a symbolic batch"):
        export.export(jax.jit(lambda x: xsake.attention(**x, implementation="triton")))(specs)


def test_new_contents_of_a_mask_run_in_the_same_program():
    program = stored(attend, arrays(2), MASK)
    other = xsake.BlockMask.from_blocks(
        np.eye(3, dtype=bool), block_q=16, block_kv=16, q_len=T, kv_len=T, is_causal=True, capacity=MASK.capacity
    )
    other = jax.tree.unflatten(jax.tree.structure(MASK), jax.tree.leaves(other))
    same(program.call(arrays(2), other), jax.jit(attend)(arrays(2), other))


@pytest.mark.parametrize("window", [None, 5, (None, 7)])
def test_static_fields_survive(window):
    mask = xsake.BlockMask.full(T, T, block_q=16, block_kv=16, is_causal=True, local_window_size=window)
    program = stored(lambda mask: mask, mask)
    assert program.in_tree.children()[0].children()[0] == jax.tree.structure(mask)
    assert jax.tree.structure(program.call(mask)) == jax.tree.structure(mask)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda header: header | {"version": 99}, r"version 99; this xsake reads.*version 2: export the program again"),
        (lambda header: header | {"static": {}}, r"damaged: fields \['block_kv', .* missing or unknown"),
        (lambda header: [], "has format"),
        (lambda header: header | {"static": header["static"] | {"block_q": 10**30}}, r"block_q=1000.* must be an int"),
    ],
)
def test_other_versions_and_damage_are_refused(change, message):
    header = change(json.loads(exported.to_bytes({name: getattr(MASK, name) for name in STATIC})))
    with pytest.raises(ValueError, match=message):
        exported.from_bytes(json.dumps(header).encode())
