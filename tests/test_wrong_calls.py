"""Wrong calls: the error's type, and a message that names the argument, what was given and what is allowed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import BlockMask
from xsake._op.registry import _BACKENDS

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

B, T, S, H, K, D = 2, 32, 48, 4, 2, 8


def ones(shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype))  # jnp.ones compiles a program for every shape


def arrays(**changes):
    shapes = dict(query=(B, T, H, D), key=(B, S, K, D), value=(B, S, K, D))
    given = {
        name: ones(changes.pop(name, shape)) if not hasattr(changes.get(name), "dtype") else changes.pop(name)
        for name, shape in shapes.items()
    }
    return given | changes


def mask(**changes):
    sizes = dict(q_len=T, kv_len=S, block_q=16, block_kv=16, heads=1, batch=1) | changes
    heads, batch = sizes.pop("heads"), sizes.pop("batch")
    n, m = -(-sizes["q_len"] // sizes["block_q"]), -(-sizes["kv_len"] // sizes["block_kv"])
    return BlockMask.from_blocks(np.ones((batch, heads, n, m), bool), **sizes)


def int32(*shape):
    return jnp.asarray(np.zeros(shape, np.int32))


# By error: changes of a right call, and the words of the message that name what is wrong.
CALLS = {
    ValueError: {
        "query of three dimensions": (
            dict(query=(T, H, D)),
            "query ... (32, 4, 8) ... [batch, length, heads, head_dim]",
        ),
        "key of five dimensions": (dict(key=(1, B, S, K, D)), "key ... (1, 2, 48, 2, 8)"),
        "value of two dimensions": (dict(value=(S, D)), "value ... (48, 8)"),
        "mixed dtypes": (
            dict(key=ones((B, S, K, D), jnp.bfloat16)),
            "one dtype ... query.dtype=float32 ... key.dtype=bfloat16",
        ),
        "other batch": (dict(key=(3, S, K, D)), "batch ... 2 ... 3"),
        "other value length": (dict(value=(B, S + 1, K, D)), "key and value ... 48 ... 49"),
        "other value heads": (dict(value=(B, S, 1, D)), "key and value ... heads ... 2 ... 1"),
        "other head dim": (dict(key=(B, S, K, 16)), "query and key ... head_dim ... 8 ... 16"),
        "heads that do not divide": (dict(query=(B, T, 3, D)), "num_q_heads=3 must be divisible by num_kv_heads=2"),
        "empty query": (dict(query=(B, 0, H, D)), "query ... empty ... (2, 0, 4, 8)"),
        "empty head dim": (dict(query=(B, T, H, 0), key=(B, S, K, 0)), "query ... empty"),
        "mask of other query length": (
            dict(mask=mask(q_len=33)),
            "mask ... 33 queries x 48 keys ... q_len=32 ... kv_len=48",
        ),
        "mask of other key length": (dict(mask=mask(kv_len=32)), "mask ... 32 queries x 32 keys ... kv_len=48"),
        "mask of other heads": (
            dict(mask=mask(heads=3)),
            "mask has 3 heads ... 1 ... num_kv_heads=2 ... num_q_heads=4",
        ),
        "mask of other batch": (dict(mask=mask(batch=3)), "mask has batch 3 ... 1 ... batch=2"),
        "bias that does not broadcast": (
            dict(bias=ones((B, H, T, S - 1))),
            "bias ... (2, 4, 32, 47) ... [2, 4, 32, 48]",
        ),
        "bias of three dimensions": (dict(bias=ones((H, T, S))), "bias ... (4, 32, 48) ... [2, 4, 32, 48]"),
        "bias per kv head": (dict(bias=ones((1, K, 1, 1))), "bias ... (1, 2, 1, 1)"),
        "sinks of other heads": (dict(sinks=ones(3)), "sinks ... [4] or [4, n] ... (3,)"),
        "sinks of three dimensions": (dict(sinks=ones((4, 1, 1))), "sinks ... [4] or [4, n] ... (4, 1, 1)"),
        "no sinks": (dict(sinks=ones((4, 0))), "sinks ... (4, 0)"),
        "one segment_ids for two lengths": (
            dict(segment_ids=int32(B, T)),
            "segment_ids ... q_len=32 ... kv_len=48 ... (query, key) pair",
        ),
        "segment_ids of other length": (
            dict(segment_ids=(int32(B, T), int32(B, T))),
            "segment_ids ... key ... 48 ... (2, 32)",
        ),
        "three segment_ids": (dict(segment_ids=(int32(B, T),) * 3), "segment_ids ... (query, key) pair ... 3"),
        "half a pair of segment_ids": (dict(segment_ids=(int32(B, T), None)), "segment_ids ... (query, key) pair"),
        "positions without a batch": (dict(positions=(int32(T), int32(S))), "positions ... query ... (32,)"),
        "positions of other batch": (dict(positions=(int32(3, T), int32(3, S))), "positions ... (3, 32)"),
        "one positions for two lengths": (dict(positions=int32(B, T)), "positions ... q_len=32 ... kv_len=48"),
        "positions beyond int32": (
            dict(positions=(np.full((B, T), 2**31), np.full((B, S), 5))),
            "positions must fit in int32 ... got 2147483648 to 2147483648",
        ),
        "segment_ids beyond int32": (
            dict(segment_ids=(np.full((B, T), 2**32), np.full((B, S), 0))),
            "segment_ids must fit in int32 ... 4294967296",
        ),
        "lengths of other batch": (dict(query_seq_lengths=int32(3)), "query_seq_lengths ... (2,) ... (3,)"),
        "a number for lengths": (dict(key_value_seq_lengths=jnp.int32(5)), "key_value_seq_lengths ... (2,) ... ()"),
        "negative window": (dict(local_window_size=-1), "local_window_size ... -1 ... negative"),
        "negative side of a window": (dict(local_window_size=(3, -2)), "local_window_size ... (3, -2) ... negative"),
        "infinite scale": (dict(scale=float("inf")), "scale ... inf ... finite"),
        "soft cap of 0": (dict(logits_soft_cap=0.0), "logits_soft_cap ... 0.0 ... above 0"),
        "deterministic as a number": (dict(deterministic=1), "deterministic=1 ... True or False"),
        "negative soft cap": (dict(logits_soft_cap=-2.0), "logits_soft_cap ... -2.0 ... above 0"),
        "unknown implementation": (dict(implementation="cuda"), "implementation='cuda' ... 'xla' ... None"),
    },
    TypeError: {
        "integer query": (dict(query=int32(B, T, H, D)), "query ... floating ... int32"),
        "integer key": (dict(key=int32(B, S, K, D)), "key ... floating ... int32"),
        "boolean value": (dict(value=ones((B, S, K, D), bool)), "value ... floating ... bool"),
        "complex query": (dict(query=ones((B, T, H, D), jnp.complex64)), "query ... floating ... complex64"),
        "array for a mask": (dict(mask=ones((T, S), bool)), "mask must be a BlockMask or None ... from_blocks"),
        "integer bias": (dict(bias=int32(1, 1, T, S)), "bias ... floating ... int32"),
        "integer sinks": (dict(sinks=int32(4)), "sinks ... floating ... int32"),
        "segment_ids of floats": (
            dict(segment_ids=(ones((B, T)), int32(B, S))),
            "segment_ids ... integers ... float32",
        ),
        "positions of floats": (dict(positions=(ones((B, T)), int32(B, S))), "positions ... integers ... float32"),
        "lengths of floats": (
            dict(key_value_seq_lengths=ones(2)),
            "key_value_seq_lengths ... integers ... float32",
        ),
        "window of floats": (dict(local_window_size=2.5), "local_window_size ... 2.5 ... (left, right)"),
        "window of three": (dict(local_window_size=(1, 2, 3)), "local_window_size ... (1, 2, 3) ... (left, right)"),
        "scale that is no number": (dict(scale="big"), "scale ... 'big' ... number"),
        "config of something else": (
            dict(implementation="xla", config=object()),
            "config ... Config ... 'xla' ... object",
        ),
    },
}


def each(table):
    return pytest.mark.parametrize(
        ("error", "name"), [(error, name) for error, names in table.items() for name in names]
    )


def assert_says(error, words, call):
    with pytest.raises(error) as raised:
        call()
    for word in words.split(" ... "):
        assert word in str(raised.value), f"{word!r} is not in {str(raised.value)!r}"


def sharded_attention(**given):
    size = 2 if jax.device_count() >= 8 else 1
    axes = dict(batch="data", sequence="sequence", heads="model")
    mesh = jax.make_mesh((size,) * 3, tuple(axes.values()), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    return xsake.sharded_attention(**given, **axes, mesh=mesh)


@pytest.mark.parametrize("operation", [xsake.attention, sharded_attention])
@each(CALLS)
def test_wrong_call(error, name, operation):
    changes, words = CALLS[error][name]
    assert_says(error, words, lambda: operation(**arrays(**changes)))


def test_the_right_call_is_right():
    """The call that CALLS change is valid by itself."""
    assert jax.eval_shape(xsake.attention, **arrays(mask=mask())).shape == (B, T, H, D)


def test_lists_are_not_arrays():
    with pytest.raises(TypeError, match="query must be an array, got list"):
        xsake.attention([[1.0]], [[1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("argument", "kind"), {"scale": "a number", "is_causal": "True or False", "return_lse": "True or False"}.items()
)
def test_a_traced_choice_is_named(argument, kind):
    with pytest.raises(TypeError, match=rf"{argument} must be {kind},? known while tracing"):
        jax.jit(lambda choice: xsake.attention(**arrays(), **{argument: choice}))(1)
    with pytest.raises(TypeError, match="is_causal must be True or False, known while tracing"):
        jax.jit(lambda choice: BlockMask.full(32, 48, is_causal=choice).density())(True)


def test_wrong_calls_raise_while_tracing_too():
    with pytest.raises(ValueError, match="num_q_heads=3 must be divisible by num_kv_heads=2"):
        jax.eval_shape(xsake.attention, *arrays(query=(B, T, 3, D)).values())


def test_an_implementation_that_is_not_here_names_itself_and_the_reason():
    """For every backend that is not available on this machine."""
    missing = {name: reason for name, reason in xsake.implementations().items() if reason is not None}
    for name, reason in missing.items():
        with pytest.raises(
            NotImplementedError, match=re.escape(f"implementation={name!r} is not available here: {reason}")
        ):
            xsake.attention(**arrays(), implementation=name)


def test_an_implementation_for_another_platform(monkeypatch):
    other = "tpu" if jax.default_backend() != "tpu" else "gpu"
    monkeypatch.setitem(_BACKENDS, "elsewhere", ("xsake.kernels_xla_ref", other))
    with pytest.raises(
        NotImplementedError,
        match=rf"implementation='elsewhere' is not available here: it needs a {other.upper()}.*{jax.default_backend()}",
    ):
        xsake.attention(**arrays(), implementation="elsewhere")
    assert other.upper() in xsake.implementations()["elsewhere"]
    assert jax.eval_shape(xsake.attention, **arrays()).shape == (B, T, H, D), "without a name, one that is here serves"


def test_a_call_that_a_named_implementation_does_not_support(monkeypatch):
    import xsake.kernels_xla_ref as backend

    monkeypatch.setattr(backend, "unsupported", lambda call: "sinks are not implemented")
    with pytest.raises(NotImplementedError, match="'xla': sinks are not implemented"):
        xsake.attention(**arrays(), implementation="xla")


def test_implementations_says_why_not():
    here = xsake.implementations()
    assert here["xla"] is None
    assert all(reason is None or (isinstance(reason, str) and len(reason) > 10) for reason in here.values())


# -- masks -------------------------------------------------------------------------------------------------------------

SIZES = dict(block_q=16, block_kv=16, q_len=32, kv_len=48)
RIGHT = np.ones((2, 3), bool)

MASKS = {
    TypeError: {
        "blocks of integers": (
            lambda: BlockMask.from_blocks(np.ones((2, 3), int), **SIZES),
            "blocks ... boolean ... int64",
        ),
        "length of floats": (lambda: BlockMask.full(32.0, 48), "q_len ... 32.0 ... int"),
        "window of floats": (
            lambda: BlockMask.full(32, 48, local_window_size=(1.5, 2)),
            "local_window_size ... (1.5, 2)",
        ),
        "indices of floats": (
            lambda: BlockMask.from_indices([[0.0], [1.0]], **SIZES),
            "kv_indices ... integers ... float64",
        ),
    },
    ValueError: {
        "blocks of one dimension": (lambda: BlockMask.from_blocks(RIGHT[0], **SIZES), "blocks ... [nQ, nK] ... (3,)"),
        "blocks of five dimensions": (
            lambda: BlockMask.from_blocks(RIGHT[None, None, None], **SIZES),
            "blocks ... [B, H, nQ, nK] ... (1, 1, 1, 2, 3)",
        ),
        "blocks of other size": (
            lambda: BlockMask.from_blocks(RIGHT.T, **SIZES),
            "blocks ... (3, 2) ... (2, 3) ... q_len=32 ... block_q=16",
        ),
        "no heads": (
            lambda: BlockMask.from_blocks(np.ones((0, 2, 3), bool), **SIZES),
            "blocks ... empty ... (0, 2, 3)",
        ),
        "block of 0": (lambda: BlockMask.from_blocks(RIGHT, **(SIZES | {"block_q": 0})), "block_q=0 ... at least 1"),
        "negative length": (lambda: BlockMask.full(32, -48), "kv_len=-48 ... at least 1"),
        "negative window": (lambda: BlockMask.full(32, 48, local_window_size=-1), "local_window_size ... -1"),
        "overflow": (
            lambda: BlockMask.from_blocks(RIGHT, **SIZES, capacity=4),
            "capacity=4 ... 6 active blocks ... capacity>=6",
        ),
        "indices of other rows": (lambda: BlockMask.from_indices([[0]], **SIZES), "kv_indices ... nQ=2 ... (1, 1)"),
        "indices out of range": (lambda: BlockMask.from_indices([[0], [3]], **SIZES), "kv_indices ... [0, 3) ... 3"),
    },
}


@each(MASKS)
def test_wrong_mask(error, name):
    call, words = MASKS[error][name]
    assert_says(error, words, call)
