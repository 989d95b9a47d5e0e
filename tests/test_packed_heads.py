"""Group packing by copies: small query blocks of heads that share a mask are computed as taller blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from targets import XLA

import xsake
from xsake._op.arguments import build_call
from xsake._rewrites.packed_heads import PackedHeads
from xsake.kernels_xla_ref import oracle
from xsake.testing.case import check_run, make

CASES = {
    "sinks and a bit per token": dict(q_heads=12, block_q=8, mask=(2, 2), density=1.0, sinks=(12,), mask_causal=True),
    "a window, lengths and positions": dict(
        q_heads=6,
        mask=(1, 1),
        local_window_size=(30, 9),
        key_value_seq_lengths=np.array([100, 57], np.int32),
        positions=np.arange(107, dtype=np.int32)[None] + np.array([[0], [5]], np.int32),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_heads(name, monkeypatch):
    case = make(XLA, **CASES[name])
    if "a bit per token" in name:
        rng = np.random.default_rng(0)
        chosen = rng.random((2, 2, case.query.shape[1], case.blocks.shape[-1])) < 0.4
        chosen[:, 0, :, 1] = True  # all bits of a block's words, also those of queries that it does not have
        case = case.replace(chosen=chosen)
    packed = []
    results = PackedHeads.results
    monkeypatch.setattr(PackedHeads, "results", lambda *given: packed.append(1) or results(*given))
    check_run(XLA, case)
    assert packed


def test_blocks_that_every_token_chose_keep_all_their_bits():
    """Concrete masks set all 32 bits of such a block, more than it has tokens."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 40, heads, 16)), jnp.float32) for heads in (4, 1))
    own = np.arange(40)[None, :, None, None] // 32
    own[0, 5] = -1  # so that there are bits at all

    def attend(own):
        return xsake.selected_attention(q, k, k, own, block_size=32)

    np.testing.assert_allclose(attend(own), jax.jit(attend)(own), rtol=1e-5, atol=1e-5)


def test_an_empty_row_stays_empty_and_nan_of_a_sink_is_kept():
    x = jnp.zeros((1, 16, 4, 8))
    mask = xsake.BlockMask.from_blocks(np.zeros((2, 1), bool), block_q=8, block_kv=16, q_len=16, kv_len=16)
    call = build_call(x, x[:, :, :2], x[:, :, :2], mask, default_blocks=(16, 16), sinks=jnp.array([0, -jnp.inf, 1, 2]))
    packed = PackedHeads(call)
    assert packed.call.query.shape == (1, 32, 2, 8)
    lse = jnp.full((1, 2, 32), -jnp.inf)
    out, both = packed.results(packed.call.query, lse)
    np.testing.assert_array_equal(out, np.zeros(x.shape))
    np.testing.assert_array_equal(both[0, :, 0], [0, -np.inf, 1, 2])
    out, both = PackedHeads(
        jax.tree.map(lambda y: jnp.full_like(y, jnp.nan) if y is call.sink_lse else y, call)
    ).results(packed.call.query, lse)
    assert np.isnan(out).all() and np.isnan(both).all()


@pytest.mark.parametrize("queries", [32, 3])
def test_arrays_on_explicit_axes(queries):
    """A configuration is chosen for arrays that lie on several devices: tall blocks, and few queries."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    sizes = ((queries, 8), (64, 2), (64, 2))
    arrays = [jnp.asarray(rng.standard_normal((2, length, heads, 16)), jnp.float32) for length, heads in sizes]
    blocks = rng.random((2, -(-queries // 16), 4)) < 0.7
    mask = xsake.BlockMask.from_blocks(blocks, block_q=16, block_kv=16, q_len=queries, kv_len=64, transpose=False)
    expected = jax.jit(oracle.attention)(*arrays, mask)  # it compiles in a fraction of the time
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
        found = jax.jit(xsake.attention)(*(jax.device_put(x, where) for x in arrays), mask)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)
