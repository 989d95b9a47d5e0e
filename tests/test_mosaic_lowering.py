"""The Mosaic GPU kernels without a GPU: every configuration and every argument lowers for Hopper."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from jax.sharding import AxisType, PartitionSpec
from sweep import sweep

import xsake
from tests.cuda_offline import lower
from xsake._op import attention as attention_op
from xsake._op.arguments import build_call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic


@pytest.fixture(autouse=True)
def assembler_is_not_asked(monkeypatch):
    """JAX starts the assembler for every bool that a kernel converts to a number (`tile.conditions`)."""

    def asked():
        raise AssertionError("a bool is converted: use mosaic_conditions")

    library = SimpleNamespace(_mosaic_gpu_ext=SimpleNamespace(_get_ptxas_isa_version=asked))
    monkeypatch.setattr(fragmented_array, "mgpu_lib", library)


SHAPES = {
    "D 128, block 128": dict(),
    "D 64, block 64, a list per head": dict(head_dim=64, block_q=64, block_kv=64),
    "D 64, block 64, a list per group": dict(head_dim=64, block_q=64, block_kv=64, kv_heads=2, mask_heads=2),
    "D 256, block 128": dict(head_dim=256),
    "D 256, block 64": dict(head_dim=256, block_q=64, block_kv=64),
    "block 256 x 128": dict(block_q=256, block_kv=128),
    "block 128 x 64": dict(block_kv=64),
    "block 64 x 128": dict(block_q=64),
    "block 128 x 16": dict(block_kv=16),
    "block 64 x 32, a list per group": dict(block_q=64, block_kv=32, kv_heads=2, mask_heads=2),
    "Dv 64": dict(value_dim=64),
    "head dims that are padded": dict(head_dim=80, value_dim=96),
    "odd lengths": dict(q_len=333, kv_len=517),
    "one query": dict(q_len=1, kv_len=300),
    "one query, block 64 x 16": dict(q_len=1, kv_len=300, block_q=64, block_kv=16),
    "eight queries, block 64 x 32": dict(q_len=8, kv_len=300, block_q=64, block_kv=32, kv_heads=2, mask_heads=2),
    "float16": dict(dtype=jnp.float16),
    "bitmaps": dict(bitmaps="of elements"),
    "bitmaps, D 256": dict(bitmaps="of elements", head_dim=256),
    "a bit per token, D 64, block 64": dict(bitmaps="of tokens", head_dim=64, block_q=64, block_kv=64),
    "8 queries of 16 heads, a bit per token": dict(
        bitmaps="of tokens", block_q=8, block_kv=64, q_heads=32, kv_heads=2, mask_heads=2
    ),
    "16 queries of 4 heads": dict(block_q=16, block_kv=64, q_heads=8, kv_heads=2, mask_heads=2),
    "16 queries of 8 heads": dict(block_q=16, block_kv=64, q_heads=16, kv_heads=2, mask_heads=2),
    "16 queries of 8 heads, block 16 x 128": dict(block_q=16, q_heads=16, kv_heads=2, mask_heads=2),
}
ARGUMENTS = {
    "segments, positions and window": dict(
        segment_ids=(np.zeros((2, 512), np.int32), np.zeros((2, 512), np.int32)),
        positions=np.arange(512, dtype=np.int32)[None],
        local_window_size=(100, 0),
    ),
    "a chunk of a prompt": dict(q_len=256, kv_len=512, local_window_size=(None, 256)),
    "window beyond every length": dict(local_window_size=(2**31 - 1, 2**40)),
    "full bias": dict(bias=np.zeros((2, 4, 512, 512), np.float32)),
    "row bias": dict(bias=np.zeros((1, 4, 1, 512), np.float32)),
    "column bias": dict(bias=np.zeros((1, 1, 512, 1), np.float32)),
    "soft cap and sinks": dict(logits_soft_cap=20.0, sinks=np.zeros(4, np.float32)),
    "negative scale": dict(scale=-0.1),
    "D 256, segments": dict(head_dim=256, segment_ids=(np.zeros((2, 512), np.int32), np.zeros((2, 512), np.int32))),
    "D 256, segments and positions": dict(
        head_dim=256,
        segment_ids=(np.zeros((2, 512), np.int32), np.zeros((2, 512), np.int32)),
        positions=np.arange(512, dtype=np.int32)[None],
    ),
    "D 256, segments and positions, odd lengths": dict(
        head_dim=256,
        q_len=333,
        kv_len=517,
        segment_ids=(np.zeros((2, 333), np.int32), np.zeros((2, 517), np.int32)),
        positions=(np.arange(333, dtype=np.int32)[None], np.arange(517, dtype=np.int32)[None]),
    ),
    "row bias, soft cap and sinks, odd lengths": dict(
        q_len=333,
        kv_len=517,
        bias=np.zeros((1, 4, 1, 517), np.float32),
        logits_soft_cap=20.0,
        sinks=np.zeros(4, np.float32),
    ),
}


def make_call(
    *,
    head_dim=128,
    value_dim=None,
    block_q=128,
    block_kv=128,
    q_len=512,
    kv_len=512,
    q_heads=4,
    kv_heads=4,
    mask_heads=4,
    dtype=jnp.bfloat16,
    bitmaps=None,
    **arguments,
):
    def zeros(length, heads, dim):
        return jnp.zeros((2, length, heads, dim), dtype)

    blocks = np.ones((mask_heads, -(-q_len // block_q), -(-kv_len // block_kv)), bool)
    sizes = dict(block_q=block_q, block_kv=block_kv, q_len=q_len, kv_len=kv_len)
    mask = xsake.BlockMask.from_blocks(blocks, **sizes, is_causal=True)
    if bitmaps == "of elements":
        mask = xsake.patterns.from_function(
            function=lambda h, q, k: (k <= q) & ((q - k) % (h + 2) == 0), of="tokens", heads=mask_heads, **sizes
        )
    elif bitmaps == "of tokens":
        numbers = np.arange(q_len)[None, :, None, None] // block_kv - np.arange(3) * np.arange(q_len)[:, None, None] % 5
        numbers = np.broadcast_to(np.maximum(numbers, -1), (1, q_len, mask_heads, 3))
        mask = xsake.BlockMask.from_token_indices(
            numbers, block_q=block_q, block_kv=block_kv, kv_len=kv_len, is_causal=True
        )
    return build_call(
        zeros(q_len, q_heads, head_dim),
        zeros(kv_len, kv_heads, head_dim),
        zeros(kv_len, kv_heads, value_dim or head_dim),
        mask,
        default_blocks=(128, 128),
        **arguments,
    )


def everything(config):
    def run(call, lse, d_out):
        out, _ = mosaic.forward(call, config)
        return out, mosaic.backward(call, config, lse, lse, d_out, with_bias=False)

    return run


def lower_all(call, config) -> None:
    assert "mosaic_gpu" in lower(everything(config), call, *_given(call))


def _given(call) -> tuple:
    lse = jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), jnp.float32)
    return lse, jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype)


QUICK = (  # of the others, an argument and the operation have some below
    "D 64, block 64, a list per group",
    "block 64 x 32, a list per group",
    "head dims that are padded",
    "eight queries, block 64 x 32",
)


@pytest.mark.parametrize("name", sweep(SHAPES, slow=SHAPES.keys() - QUICK))
def test_defaults_lower(name):
    call = make_call(**SHAPES[name])
    assert mosaic.unsupported(call) is None
    lower_all(call, mosaic.default_config(call))


@pytest.mark.parametrize(
    "name", sweep(ARGUMENTS, slow=ARGUMENTS.keys() - {"a chunk of a prompt", "segments, positions and window"})
)
def test_every_argument_lowers(name):
    call = make_call(**ARGUMENTS[name])
    lower_all(call, mosaic.default_config(call))


def test_two_warpgroups_share_keys_where_these_fit():
    """With positions, keys of even lengths have no index: counting one would leave no room for the second warpgroup."""
    call = make_call(**ARGUMENTS["D 256, segments and positions"])
    assert mosaic.default_config(call).dq.compute_wgs == 2


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_call_gets_one_backward_kernel(head_dim, deterministic):
    call = replace(make_call(q_len=8192, kv_len=8192, head_dim=head_dim), deterministic=deterministic)
    assert mosaic.default_config(call).fused.use


SPACES = ["D 128, block 128", "D 64, block 64, a list per head", "D 256, block 128"]


@pytest.mark.parametrize("name", SPACES)
def test_the_search_space_holds_the_default(name):
    call = make_call(**SHAPES[name])
    assert mosaic.default_config(call) in mosaic.search_space(call)


@pytest.mark.slow  # the default configuration is lowered above
@pytest.mark.parametrize("name", SPACES)
def test_every_config_lowers(name):
    """Each kernel's configurations once."""
    call = make_call(**SHAPES[name])
    space = mosaic.search_space(call)
    forwards, dqs, dkvs, fused = (list(dict.fromkeys(getattr(c, f.name) for c in space)) for f in fields(mosaic.Config))
    for part in forwards:
        assert "mosaic_gpu" in lower(partial(mosaic.forward, config=replace(space[0], forward=part)), call)
    lse, d_out = _given(call)
    for dq, dkv in itertools.zip_longest(dqs, dkvs):
        config = replace(space[0], dq=dq or dqs[0], dkv=dkv or dkvs[0])
        backward = partial(mosaic.backward, config=config, with_bias=False)
        assert "mosaic_gpu" in lower(backward, call, lse=lse, delta=lse, d_out=d_out)
    for part in fused:
        backward = partial(mosaic.backward, config=replace(space[0], fused=part), with_bias=False)
        assert "mosaic_gpu" in lower(backward, call, lse=lse, delta=lse, d_out=d_out)


def test_unsupported_names_the_argument():
    assert "dtype" in mosaic.unsupported(make_call(dtype=jnp.float32))
    assert "block_q=32" in mosaic.unsupported(make_call(block_q=32))
    assert "head_dim=320" in mosaic.unsupported(make_call(head_dim=320))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(block_kv=24), "must be a multiple of 64, or 16, 32 or 48"),
        (dict(block_kv=96), "must be a multiple of 64, or 16, 32 or 48"),
        (dict(block_kv=16, block_q=16, q_heads=8, kv_heads=2, mask_heads=2), "where mask.block_q=16 is not"),
        (dict(block_kv=16, bias=jnp.zeros((1, 1, 512, 512), jnp.bfloat16)), "where there is bias"),
        (dict(block_kv=16, segment_ids=jnp.zeros((2, 512), jnp.int32)), "where there is q_segments"),
        (dict(block_kv=16, positions=jnp.zeros((2, 512), jnp.int32)), "where there is q_positions"),
        (dict(block_kv=16, bitmaps="of elements"), "where there are bitmaps"),
    ],
)
def test_short_blocks_name_what_they_do_not_know(given, said):
    reason = mosaic.unsupported(make_call(**given))
    assert reason is not None and f"mask.block_kv={given['block_kv']}" in reason and said in reason


def test_short_blocks_are_tuned_in_every_kernel_that_takes_them():
    call = make_call(block_kv=16)
    space = mosaic.search_space(call)
    assert all(len({getattr(c, name) for c in space}) > 1 for name in ("forward", "dq", "dkv"))
    assert {c.dq.tile for c in space} == {64, 128} and len({c.fused for c in space}) == 1
    assert all(mosaic.misfit(call, config) is None for config in space)
    fused = replace(space[0], fused=replace(space[0].fused, use=True))
    assert "under 64 queries or keys" in mosaic.misfit(call, fused)


def test_a_call_by_name_without_the_gpu_raises():
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    if xsake.implementations()["mosaic_gpu"] is None:
        pytest.skip("this machine has the GPU")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*GPU"):
        xsake.attention(q, q, q, implementation="mosaic_gpu")


CALLS = [(2048, False), (2048, True), (8192, False), (8192, True)]  # length: two kernels, and the fused one; mapped


@pytest.mark.parametrize("of", sweep(CALLS, slow=CALLS[1:3]), ids=str)
def test_the_operation_lowers_with_its_gradient(of, monkeypatch):
    """Kernels that keep a counter or sums in global memory also lower inside the operation's wrappers."""
    length, mapped = of
    monkeypatch.setattr(mosaic, "unavailable", lambda: None)
    monkeypatch.setattr(attention_op, "platform_of", lambda query: "gpu")
    mask = xsake.BlockMask.full(length, length, block_q=128, block_kv=128, is_causal=True)

    def gradient(q, mask):
        return jax.vjp(lambda *x: xsake.attention(*x, mask, implementation="mosaic_gpu"), q, q, q)[1](q)

    shape = (1, length, 4, 128)
    q = jax.ShapeDtypeStruct((2, *shape) if mapped else shape, jnp.bfloat16)
    text = lower(jax.vmap(gradient, in_axes=(0, None)) if mapped else gradient, q, mask)
    assert ("block_sparse_backward" in text) == (length == 8192)
    assert "mosaic_gpu" in text


IN_SHARDS = {"D 128, block 128": 8192, "8 queries of 16 heads, a bit per token": 512, "bitmaps": 512}


@pytest.mark.parametrize("name", sweep(IN_SHARDS, slow=["D 128, block 128", "bitmaps"]))
def test_gradients_lower_in_a_shard_map(name, monkeypatch):
    """With its checks of varying axes, which see the kernels' own loops and the numbers that are made for them."""
    monkeypatch.setattr(mosaic, "unavailable", lambda: None)
    monkeypatch.setattr(attention_op, "platform_of", lambda query: "gpu")
    length = IN_SHARDS[name]
    call = make_call(**(SHAPES[name] | dict(q_len=length, kv_len=length)))

    def gradients(q, k, v):
        out, pull = jax.vjp(lambda *x: xsake.attention(*x, call.mask, implementation="mosaic_gpu"), q, k, v)
        return pull(out)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    cut = jax.shard_map(gradients, mesh=mesh, in_specs=(PartitionSpec("x"),) * 3, out_specs=PartitionSpec("x"))
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (call.query, call.key, call.value)]
    assert "mosaic_gpu" in jax.jit(cut).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def test_a_call_has_the_same_key_in_the_compilation_cache_whatever_came_before():
    """JAX before 0.12 numbered the modules of kernels, and the number was in the key."""
    calls = [make_call(q_len=length, kv_len=length) for length in (256, 128, 256)]
    first, other, again = (lower(everything(mosaic.default_config(call)), call, *_given(call)) for call in calls)
    assert first == again != other
