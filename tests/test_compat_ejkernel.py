"""`xsake.compat.ejkernel`: what ejkernel documents, against dense formulas; the cases that it computes wrongly."""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import normal
from jax.sharding import Mesh, PartitionSpec
from sweep import sweep

import xsake
from xsake.compat import ejkernel
from xsake.compat.ejkernel import BwdParams, FwdParams, SparseMask

B, H, K, T, D = 2, 4, 2, 96, 16


def inputs(t=T, s=T, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, H, t, D), (B, K, s, D), (B, K, s, D))]


def dense(q, k, v, attends, *, cap=None, bias=None, sinks=None):
    """[B, H, T, D]; attends is bool[B | 1, H | 1, T, S], sinks are [H, n]; 0 where nothing attends."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = jnp.einsum("bhtd,bhsd->bhts", q, k, precision="highest") * D**-0.5
    x = x if bias is None else x + bias
    x = x if cap is None else cap * jnp.tanh(x / cap)
    p = jnp.where(attends, jnp.exp(x), 0.0)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks).sum(-1)[None, :, None, None]
    return jnp.einsum("bhts,bhsd->bhtd", p / jnp.where(total == 0, 1.0, total), v, precision="highest")


def assert_same(ours, theirs, *given):
    """Outputs, and gradients with random cotangents, of functions of the same inputs."""
    d_out = normal(3, jax.eval_shape(theirs, *given).shape)

    def everything(function):
        def run(*given):
            out, vjp = jax.vjp(function, *given)
            return out, *vjp(d_out)

        return jax.jit(run)(*given)

    for one, other in zip(everything(ours), everything(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5, rtol=3e-5)


Q, S = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = (S <= Q)[None, None]
PER_HEAD = np.random.default_rng(1).random((B, H, T, T)) < 0.5
POSITIONS = np.random.default_rng(2).permutation(T)[None].repeat(B, 0).astype(np.int32)
SEGMENTS = np.sort(np.random.default_rng(3).integers(-1, 3, (B, T)), -1).astype(np.int32)
LAYOUT = SparseMask(lower_bounds=np.array([[[0, 0, 1]]]), upper_bounds=np.array([[[1, 2, 3]]]))
BIAS, AUX = normal(1, (1, H, T, T)), normal(2, (3,))


class Local:
    """A mask as those of splash attention: a shape, and booleans for slices."""

    shape = (T, T)

    def __init__(self, reach):
        self.reach = reach

    def __getitem__(self, index):
        q, k = (np.arange(T)[i] for i in index)
        return np.abs(q[:, None] - k[None]) <= self.reach


def near(q_len, kv_len, heads, head, group):
    assert (q_len, kv_len, heads, group) == (T, T, H, H // K)
    return Local(5 + 10 * head)


OF_LAYOUT = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)[Q // 32, S // 32][None, None]
REACH = 5 + 10 * np.arange(H)[:, None, None]
CASES = {
    "positions": (
        dict(q_positions=POSITIONS, kv_positions=POSITIONS, sliding_window=(40, 0)),
        ((lambda past: (past >= 0) & (past <= 40))(POSITIONS[:, :, None] - POSITIONS[:, None]))[:, None],
        {},
    ),
    "softmax_aux": (dict(softmax_aux=AUX), CAUSAL, dict(sinks=jnp.asarray(np.tile(AUX, (H, 1))))),
    "attention_mask": (dict(attention_mask=PER_HEAD), CAUSAL & PER_HEAD, {}),
    "sliding_window": (dict(sliding_window=13, causal=False), (np.abs(Q - S) <= 13)[None, None], {}),
    "logits_soft_cap": (dict(logits_soft_cap=1.5), CAUSAL, dict(cap=1.5)),
    "bias": (dict(bias=BIAS), CAUSAL, dict(bias=BIAS)),
    "segments": (
        dict(q_segment_ids=SEGMENTS, kv_segment_ids=SEGMENTS),
        CAUSAL & ((SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS >= 0)[:, None])[:, None],
        {},
    ),
    "qkv_layouts": (dict(qkv_layouts=(LAYOUT,), chunk_size=32), CAUSAL & OF_LAYOUT, {}),
    "mask_builder of heads": (dict(mask_builder=near, causal=False), (np.abs(Q - S) <= REACH)[None], {}),
    "mask_builder of a layout": (dict(mask_builder=lambda: LAYOUT, chunk_size=32), CAUSAL & OF_LAYOUT, {}),
    "fwd block != bwd block": (
        dict(
            fwd_params=FwdParams(q_blocksize=32, kv_blocksize=64), bwd_params=BwdParams(q_blocksize=48, kv_blocksize=16)
        ),
        CAUSAL,
        {},
    ),
    "chunk_size": (dict(chunk_size=24, fused_backward=True), CAUSAL, {}),
}
IN_CI = ["mask_builder of heads"]


@pytest.mark.parametrize("name", sweep(CASES, slow=[name for name in CASES if name not in IN_CI]))
def test_predecessor_argument(name):
    options, attends, of_formula = CASES[name]
    ours = partial(ejkernel.blocksparse_attention, **options)
    assert_same(ours, lambda q, k, v: dense(q, k, v, attends, **of_formula), *inputs())


@pytest.mark.slow
def test_predecessor_a_traced_attention_mask_and_rows_that_attend_nothing():
    given = PER_HEAD & (np.arange(T) % 7 != 0)[None, None, :, None]

    @jax.jit
    def run(q, k, v, mask):
        return ejkernel.blocksparse_attention(q, k, v, attention_mask=mask, causal=False)

    out = run(*inputs(), given[:, 0].astype(np.int32))
    np.testing.assert_allclose(out, dense(*inputs(), given[:, :1]), atol=3e-5)
    assert (out[:, :, ::7] == 0).all()


@pytest.mark.parametrize("keys", sweep(["cut", "whole"], slow=["whole"]))
@pytest.mark.parametrize("window", sweep([None, 21], slow=[None]))
def test_predecessor_sequence_parallelism(keys, window):
    """Offsets never reached the mask: 8 shards give what one device gives."""
    q, k, v = inputs()
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    cut = PartitionSpec(None, None, "sp")
    of_keys = cut if keys == "cut" else PartitionSpec()
    options = dict(sliding_window=window)

    def shard(*x):
        return ejkernel.blocksparse_attention(*x, sequence_parallelism_mesh_axis_name="sp", **options)

    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(cut, of_keys, of_keys), out_specs=cut))
    back = Q - S
    attends = (back >= 0) & (back <= (T if window is None else window))
    np.testing.assert_allclose(run(q, k, v), dense(q, k, v, attends[None, None]), atol=3e-5)


def test_signatures_are_those_of_the_documentation():
    names = {
        "blocksparse_attention": "query key value q_segment_ids kv_segment_ids q_positions kv_positions softmax_aux "
        "bias attention_mask sequence_parallelism_mesh_axis_name logits_soft_cap qkv_layouts softmax_scale fwd_params "
        "bwd_params mask_builder sliding_window chunk_size causal fused_backward",
        "native_sparse_attention": "query key value g_cmp g_slc block_indices block_counts block_size softmax_scale "
        "cu_seqlens",
        "apply_native_sparse_attention": "query key value block_indices block_counts block_size softmax_scale "
        "cu_seqlens token_indices",
    }
    for name, expected in names.items():
        assert [*inspect.signature(getattr(ejkernel, name)).parameters] == expected.split()


REFUSED = {
    "token_indices": (
        lambda q: ejkernel.apply_native_sparse_attention(q, q, q, np.zeros((B, T, H, 1), int), token_indices=Q),
        "token_indices follow from cu_seqlens",
    ),
    "blocks": (lambda q: ejkernel.native_sparse_attention(q, q, q), "give g_cmp.* or block_indices"),
    "gate": (lambda q: ejkernel.native_sparse_attention(q, q, q, g_cmp=np.ones((B, T, 3))), r"g_cmp must be \[batch"),
}
REFUSED_BLOCKSPARSE = {
    "params": (dict(fwd_params=FwdParams(blocksize_m=3)), "fwd_params: blocksize_m belong to other kernels"),
    "chunk_size": (dict(chunk_size=0), "chunk_size=0 must be an int of at least 1"),
    "twice": (dict(chunk_size=32, fwd_params=FwdParams(q_blocksize=32)), "say the same: give one of them"),
    "layouts": (dict(qkv_layouts=(LAYOUT,)), r"bounds of a SparseMask must be \[2, 1, 2\] for blocks of 64 x 64"),
    "axis": (dict(sequence_parallelism_mesh_axis_name="sp"), "is no axis here: call inside jax.shard_map"),
    "aux": (dict(softmax_aux=np.ones((3, 2))), r"softmax_aux must be \[sinks\], or \[4, sinks\] or \[2, sinks\]"),
    "mask": (dict(attention_mask=np.ones((3, T, T), bool)), "attention_mask must broadcast to"),
    "builder": (dict(mask_builder=lambda *five: None), "for head 0 it gave NoneType"),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_BLOCKSPARSE])
def test_wrong_arguments_are_refused_by_name(name):
    if name in REFUSED:
        call, message = REFUSED[name]
        call = partial(call, jnp.ones((B, T, H, D)))
    else:
        options, message = REFUSED_BLOCKSPARSE[name]
        call = partial(ejkernel.blocksparse_attention, *inputs(), **options)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


# -- the examples of the documentation ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_examples_of_blocksparse_attention():
    """Corrected: block sizes are in fwd_params, not arguments of their own. Smaller."""
    q = k = v = jnp.ones((2, 12, 256, 64))
    out = ejkernel.blocksparse_attention(q, k, v, fwd_params=FwdParams(q_blocksize=128, kv_blocksize=128), causal=True)
    assert out.shape == q.shape
    sizes = FwdParams(q_blocksize=64, kv_blocksize=64)
    assert ejkernel.blocksparse_attention(q, k, v, sliding_window=(64, 64), fwd_params=sizes).shape == q.shape
    np.testing.assert_allclose(ejkernel.blocksparse_attention(q, k, v), v, atol=1e-6)


def local_pattern(num_blocks, window=2):
    rows = []
    for i in range(num_blocks):
        local = list(range(max(0, i - window), min(num_blocks, i + window + 1)))
        rows.append(local + [0] * (window * 2 + 1 - len(local)))
    return jnp.array(rows)


@pytest.mark.slow
def test_examples_of_native_sparse_attention():
    """Corrected: the arrays have the names that the calls use. Smaller."""
    batch, seq_len, heads, dim, block = 2, 256, 8, 16, 32
    blocks = seq_len // block
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(x, (batch, seq_len, heads, dim)) for x in keys)
    first_four = jnp.tile(jnp.arange(4)[None, None, None, :], (batch, heads, blocks, 1))
    out = ejkernel.apply_native_sparse_attention(query, key, value, first_four, 4, block)
    expected = xsake.attention(query, key[:, :128], value[:, :128], is_causal=True)
    np.testing.assert_allclose(out, expected, atol=1e-5)

    local = jnp.tile(local_pattern(blocks)[None, None], (batch, heads, 1, 1))
    out = ejkernel.apply_native_sparse_attention(query, key, value, local, block_counts=5, block_size=block)
    i, j = np.arange(blocks)[:, None], np.arange(blocks)[None]
    near = (i - j <= 2) | ((j == 0) & (i < 2)) | ((j == 0) & (i >= blocks - 2))  # [0] * ... also names block 0
    mask = xsake.BlockMask.from_blocks(
        near, block_q=block, block_kv=block, q_len=seq_len, kv_len=seq_len, is_causal=True
    )
    np.testing.assert_allclose(out, xsake.attention(query, key, value, mask), atol=1e-5)

    per_channel = jnp.ones((batch, seq_len, heads * dim))  # the example's gate; the signature says [.., heads]
    out = ejkernel.native_sparse_attention(query, key, value, g_cmp=per_channel, block_counts=4, block_size=block)
    gate = jnp.ones((batch, seq_len, heads))
    same = xsake.native_sparse_attention(
        query, key, value, gate_compressed=gate, block_size=block, num_selected=4, keep_first=False
    )
    np.testing.assert_allclose(out, same, atol=1e-6)
    with pytest.warns(UserWarning, match="block_indices is not used when g_cmp is given"):
        ejkernel.native_sparse_attention(query, key, value, g_cmp=gate, block_indices=first_four, block_size=block)
