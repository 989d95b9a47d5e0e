"""Masks with bitmaps: any elements of a block, on every backend; one that does not know them refuses them by name."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sweep import sweep

import xsake
from xsake._op import registry
from xsake._op.arguments import build_call
from xsake.hads.mask.bitmaps import unpack
from xsake.kernels_pallas_gpu.triton import backend as triton
from xsake.testing.case import check_run, make

CASES = {
    "per batch and head": dict(mask=(2, 4)),
    "per batch, half precision": dict(mask=(2, 1), dtype="bfloat16", q_len=64),
    "with every argument": dict(
        mask=(1, 2),
        mask_causal=True,
        bias=(1, 0, 0, 0),
        sinks=(4,),
        logits_soft_cap=2.0,
        local_window_size=(60, 40),
        key_value_seq_lengths=np.array([100, 57], np.int32),
    ),
    "a bit per token": dict(mask=(2, 2), density=1.0, block_q=16, block_kv=16, q_len=100, mask_causal=True),
}


def with_elements(case, name):
    rng = np.random.default_rng(1)
    shape = (*case.blocks.shape[:2], case.query.shape[1], case.key.shape[1])
    if name == "a bit per token":
        return case.replace(chosen=rng.random((*shape[:3], case.blocks.shape[-1])) < 0.4)
    return case.replace(elements=rng.random(shape) < 0.6)


@pytest.mark.parametrize("name", sweep(CASES, slow=[name for name in CASES if name != "with every argument"]))
def test_bitmaps(implementation, name):
    options = dict(CASES[name])
    if options.get("dtype", "float32") not in implementation.dtypes:
        options["dtype"] = implementation.dtypes[0]
    case = with_elements(make(implementation, **options), name)
    assert case.mask().bitmaps is not None
    check_run(implementation, case)


def test_a_backend_that_does_not_know_bitmaps_refuses_them_by_name(monkeypatch):
    mask = xsake.patterns.from_function(64, 64, lambda q, k: (q + k) % 4 == 0, of="tokens", **SIZES_32)
    x = jnp.ones((1, 64, 1, 16))
    call = build_call(x, x, x, mask, default_blocks=(32, 32))
    assert registry.choose(["triton", "xla"], call) == "triton"
    monkeypatch.setattr(triton, "HONOURS", triton.HONOURS - {"bitmaps"})
    assert registry.unsupported("triton", call).startswith("it does not honour a mask with bitmaps")
    assert registry.choose(["triton", "xla"], call) == "xla"


def of_columns(mask):
    """The elements that the transposed lists say, bool[b, h, nK, nQ, block_q, block_kv]."""
    bits = unpack(np, np.asarray(mask.bitmaps), mask.block_q, mask.block_kv)
    bits = np.broadcast_to(bits, (mask.batch, mask.heads, *bits.shape[2:]))
    found = np.zeros((mask.batch, mask.heads, mask.num_kv_blocks, mask.num_q_blocks, *bits.shape[3:]), bool)
    for b, h, j in np.ndindex(found.shape[:3]):
        for slot in range(int(mask.q_row_ptr[b, h, j]), int(mask.q_row_ptr[b, h, j + 1])):
            found[b, h, j, mask.q_indices[b, h, slot]] = bits[b, h, mask.q_bitmap[b, h, slot]]
    return found


SIZES = dict(block_q=40, block_kv=16)
SIZES_32 = dict(block_q=32, block_kv=32)


def dense(function, t, s, batch=1, heads=1):
    b, h, q, k = np.ogrid[:batch, :heads, :t, :s]
    return np.broadcast_to(function(b, h, q, k), (batch, heads, t, s))


def rule(b, h, q, k):
    return ((q * 7 + k * 3 + h + 2 * b) % 5 < 2) & (q - k < 50)


@pytest.mark.parametrize("traced", sweep([False, True], slow=[True]))
def test_the_transpose_is_exact(traced):
    def build(zero):
        return xsake.patterns.from_function(
            130, 90, lambda b, h, q, k: rule(b, h, q, k + zero), of="tokens", batch=2, heads=3, **SIZES
        )

    mask = jax.jit(build)(0) if traced else build(0)
    expected = dense(rule, 130, 90, 2, 3)
    assert (mask.to_elements() == expected).all()
    columns = of_columns(mask).transpose(0, 1, 3, 4, 2, 5).reshape(2, 3, 160, 96)
    assert (columns[:, :, :130, :90] == expected).all()


def test_blocks_are_classified():
    def staircase(q, k):
        return (k < 32) | ((k < 64) & (q % 2 == 0)) | ((k >= 96) & (q < 32))

    mask = xsake.patterns.from_function(96, 128, staircase, of="tokens", block_q=32, block_kv=32)
    assert mask.to_blocks()[0, 0].astype(int).tolist() == [[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert mask.kv_num_full[0, 0].tolist() == [2, 1, 1]
    assert mask.bitmaps.shape == (1, 1, 2, 32, 1), "the one partial bitmap, and the one of full blocks"
    whole = xsake.patterns.from_function(96, 128, lambda q, k: (k // 32 == 1) & (q >= 0), of="tokens", **SIZES_32)
    assert whole.bitmaps is None, "a mask of whole blocks costs nothing more"


def test_save_and_load_and_picture(tmp_path):
    mask = xsake.patterns.from_function(64, 64, lambda q, k: (q + k) % 4 == 0, of="tokens", **SIZES_32)
    mask.save(tmp_path / "mask.npz")
    again = xsake.BlockMask.load(tmp_path / "mask.npz")
    assert jax.tree.structure(again) == jax.tree.structure(mask)
    jax.tree.map(np.testing.assert_array_equal, again, mask)
    assert "2 bitmaps" in repr(mask) and str(mask).endswith("░░\n░░")


def test_what_bitmaps_cannot_do_yet_is_refused_by_name():
    mask = xsake.patterns.from_function(64, 64, lambda q, k: (q + k) % 4 == 0, of="tokens", **SIZES_32)
    x, mesh = jnp.ones((1, 64, 1, 16)), Mesh(np.array(jax.devices()[:2]), ("seq",))
    with pytest.raises(NotImplementedError, match="bitmaps"):
        xsake.sharded_attention(x, x, x, mask, mesh=mesh, sequence="seq", exchange="sparse")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch=2), "batch=2 also needs heads"),
        (dict(heads=0), "heads=0 must be an int of at least 1"),
        (dict(heads=2, of="blocks"), 'are for of="tokens"'),
    ],
)
def test_wrong_functions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        xsake.patterns.from_function(64, 64, lambda *given: True, **(dict(of="tokens") | options))


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "order"), [("gather", "contiguous"), ("ring", "zigzag")])
@pytest.mark.parametrize("traced", [False, True])
def test_sequences_over_devices(exchange, order, traced):
    """8 shards give what one device gives, gradients included."""
    t, shards = 256, 8
    segments = np.sort(np.random.default_rng(0).integers(0, 5, (2, t)), -1)
    inputs = [jax.random.normal(key, (2, t, 2, 16)) for key in jax.random.split(jax.random.key(0), 4)]
    mesh = Mesh(np.array(jax.devices()), ("seq",))

    def build(segments):
        return xsake.patterns.documents(segments, block_q=16, block_kv=16)

    def results(attend, q, k, v, d_out, mask):
        out, vjp = jax.vjp(lambda *x: attend(*x, mask), q, k, v)
        return out, *vjp(d_out)

    def lay(x):
        return xsake.zigzag(x, shards) if order == "zigzag" else x

    def over_devices(q, k, v, mask):
        return xsake.sharded_attention(q, k, v, mask, mesh=mesh, sequence="seq", exchange=exchange, order=order)

    mask = build(segments)
    wanted = jax.jit(partial(results, xsake.attention))(*inputs, mask)
    laid = [lay(x) for x in inputs]
    if traced:
        got = jax.jit(lambda segments: results(over_devices, *laid, build(segments)))(segments)
    else:
        got = jax.jit(lambda *x: results(over_devices, *x, mask))(*laid)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, lay(other), atol=2e-5)


@pytest.mark.slow
def test_vmap_and_mesh():
    segments = np.sort(np.random.default_rng(0).integers(0, 5, (4, 64)), -1)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, 64, n, 16)) for key, n in zip(keys, (4, 2, 2), strict=True))

    def attend(q, k, v, segments):
        return xsake.attention(q, k, v, xsake.patterns.documents(segments, block_q=16, block_kv=16))

    together = jax.jit(attend)(q, k, v, segments)
    one_by_one = jax.jit(jax.vmap(lambda *x: attend(*(y[None] for y in x))[0]))(q, k, v, segments)
    np.testing.assert_allclose(one_by_one, together, atol=1e-6)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    cut = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, "model"))) for x in (q, k, v)]
    mask = xsake.patterns.documents(segments, block_q=16, block_kv=16)
    assert mask.bitmaps.shape[:2] == (1, 1) and mask.batch == 4
    np.testing.assert_allclose(jax.jit(xsake.attention)(*cut, mask), together, atol=1e-6)
