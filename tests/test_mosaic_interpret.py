"""The Mosaic GPU kernels in JAX's interpreter, race detection on: a few small cases here, the shared suite on hardware.

The interpreter models the copy engine and barriers, and takes about a second per CTA. Tensor-core products
are plain products there, and the schedule is static.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep
from targets import HOPPER
from targets import HOPPER_INTERPRETED as TARGET

import xsake
from xsake._ground.device import cpu_workers
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.hopper.backend import BackwardConfig, Config, ForwardConfig
from xsake.kernels_pallas_gpu.hopper.forward import launch
from xsake.kernels_pallas_gpu.lists import work_order
from xsake.kernels_pallas_gpu.lists.merge import merged_rows
from xsake.kernels_xla_ref import oracle
from xsake.testing.case import check_forward, check_run, make

SMALL = dict(batch=1, q_heads=1, kv_heads=1, mask=(1, 1), q_len=64, exact_lengths=False)

CASES = {
    "causal, block 128": dict(block_q=32, block_kv=32, mask_causal=True, density=1.0),
    "block 64, a list per head, odd lengths": dict(
        q_len=70, kv_len=133, exact_lengths=True, block_q=16, block_kv=16, q_heads=2, kv_heads=2, mask=(1, 2)
    ),
    "block 64, heads that share a list, sinks and soft cap": dict(
        q_len=32, block_q=16, block_kv=32, q_heads=2, mask_causal=True, sinks=(2,), logits_soft_cap=2.0
    ),
    "empty rows": dict(block_q=32, block_kv=32, density=0.0),
    "window, sinks and soft cap": dict(
        q_len=32, block_q=32, block_kv=32, density=1.0, mask_window=(40, 3), sinks=(1,), logits_soft_cap=2.0
    ),
    "short blocks of keys, causal": dict(q_len=48, block_q=32, block_kv=4, mask_causal=True, density=0.4),
    "short blocks of keys, two list heads, odd lengths": dict(
        q_len=70, kv_len=133, exact_lengths=True, block_q=16, block_kv=8, q_heads=2, kv_heads=2, mask=(1, 2)
    ),
    "blocks of 48 keys, window": dict(q_len=48, block_q=16, block_kv=12, mask_window=(60, 3), density=0.4),
    "short blocks of keys, soft cap and sinks, no band": dict(
        q_len=32,
        kv_len=75,
        exact_lengths=True,
        block_q=16,
        block_kv=8,
        q_heads=2,
        density=0.4,
        sinks=(2,),
        logits_soft_cap=2.0,
    ),
    "bias and float16": dict(q_len=32, block_q=32, block_kv=16, density=1.0, bias=(1, 1, 0, 0), dtype="float16"),
}


@pytest.mark.slow  # the next two tests have a list of several blocks, and every argument
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_smoke(name):
    check_run(TARGET, make(TARGET, **(SMALL | CASES[name])))


def with_dims(target, dims):
    head_dim, value_dim = dims
    return dataclasses.replace(target, head_dim=head_dim, value_dim=value_dim)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_short_blocks_where_two_warpgroups_share_keys():
    """Accumulators of head dimensions 256 fill two warpgroups."""
    case = make(with_dims(TARGET, (256, 256)), **(SMALL | dict(q_len=32, block_q=16, block_kv=4, density=0.4)))
    check_run(with_dims(TARGET, (256, 256)), case)


DIMS = [(80, 80), (96, 96), (160, 160), (192, 128)]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims(dims):
    check_run(TARGET, make(with_dims(TARGET, dims), **(SMALL | CASES["causal, block 128"])))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS)
def test_head_dims_on_hopper(dims):
    check_run(HOPPER, make(with_dims(HOPPER, dims), q_heads=4, kv_heads=2, mask=(1, 2), mask_causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [16, 32, 48])
@pytest.mark.parametrize("queries", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_short_blocks_on_hopper(queries, keys, is_causal):
    blocks = dict(block_q=queries // HOPPER.unit, block_kv=keys // HOPPER.unit)
    case = make(HOPPER, **blocks, q_heads=4, kv_heads=2, mask=(1, 4), mask_causal=is_causal, density=0.3)
    assert (case.block_q, case.block_kv) == (queries, keys)
    check_run(HOPPER, case)


@pytest.mark.timeout(240)
@pytest.mark.slow  # the other test walks tiles, too
@pytest.mark.parametrize("block_kv", [32, 8])
def test_one_cta_walks_all_tiles(block_kv):
    """The longest tile comes first, and one tile has no keys; the next tile's logits are computed ahead."""
    density = 0.35 if block_kv == 32 else 0.1
    case = make(TARGET, **(SMALL | dict(q_len=96, block_q=32, block_kv=block_kv, density=density, seed=1)))
    counts = case.blocks.sum(-1)
    assert counts.min() == 0 < counts.max()
    forward = ForwardConfig(q_stages=2, num_ctas=1, tile_kv=64 if "96" in name else 128)
    check_run(TARGET, case, config=Config(forward=forward, dq=BackwardConfig(), dkv=BackwardConfig()))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("head_dim", [64, 128])  # rings of four tiles of keys, and of two
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_neighbouring_rows_share_what_both_list(head_dim, seed):
    """Blocks of 64 with a list per head. One CTA takes all pairs: those of long lists, of few common ones, of none."""
    rng = np.random.default_rng(seed)
    blocks = rng.random((1, 5, 15)) < rng.uniform(0.1, 0.9, (1, 5, 1))
    blocks[0, 4 * seed] = False
    mask = xsake.BlockMask.from_blocks(blocks, block_q=64, block_kv=64, q_len=310, kv_len=950)
    q, k, v = (jnp.asarray(rng.standard_normal((1, n, 1, head_dim)), jnp.bfloat16) for n in (310, 950, 950))
    want = jax.jit(oracle.attention)(q, k, v, mask)
    forward = ForwardConfig(num_ctas=1, stages=256 // head_dim)
    config = Config(forward=forward, dq=BackwardConfig(), dkv=BackwardConfig())
    with xsake.interpret():
        found = xsake.attention(q, k, v, mask, implementation="mosaic_gpu", config=config)
    np.testing.assert_allclose(np.asarray(found, np.float32), want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("common", [0.0, 0.8])
@pytest.mark.parametrize("options", [dict(is_causal=True), dict(local_window_size=(700, 0)), {}])
def test_neighbouring_rows_on_hopper(head_dim, common, options):
    """Rows in pairs that have none or most of their blocks in common; an odd number of rows, some of them empty."""
    rng = np.random.default_rng(head_dim)
    n, length = 33, 33 * 64 - 10
    shared = np.repeat(rng.random((6, n // 2 + 1, n)) < 0.4 * common, 2, axis=1)[:, :n]
    blocks = shared | (rng.random((6, n, n)) < rng.uniform(0, 0.4 * (1 - common), (6, n, 1)))
    blocks[:, 5:7] = False
    mask = xsake.BlockMask.from_blocks(blocks, block_q=64, block_kv=64, q_len=length, kv_len=length, **options)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, heads, head_dim)), jnp.bfloat16) for heads in (6, 2, 2))
    want = xsake.attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask, implementation="xla")
    found = xsake.attention(q, k, v, mask, implementation="mosaic_gpu")
    np.testing.assert_allclose(np.asarray(found, np.float32), want, atol=2e-2, rtol=2e-2)


CHUNK = dict(q_heads=2, kv_heads=1, mask=(1, 2), mask_window=(None, 256), block_q=16, block_kv=16, density=0.15)


def chunk_with_long_rows(target, workers, **sizes):
    """A chunk of a prompt: the last rows of a head look at everything, all others at little."""
    case = make(target, **(SMALL | CHUNK | sizes))
    case.blocks[:, 1, -case.blocks.shape[2] // 4 :] = True
    lengths = np.diff(case.mask().kv_row_ptr)
    assert lengths.size > workers and lengths.max() > lengths.sum() / workers, "there is something to cut"
    return case


CHUNKS = {
    "in parts": dict(),
    "in parts, head_dim 96": dict(head_dim=96, value_dim=96),
    "whole, with a bias": dict(bias=(1, 1, 1, 0)),
    "whole, with sinks": dict(sinks=(2,)),
    "whole, packed heads": dict(q_len=8, kv_len=72, q_heads=8, kv_heads=2, block_q=4),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sweep(CHUNKS, slow=["in parts", "whole, with a bias", "whole, with sinks"]))
def test_long_rows_come_first(monkeypatch, name):
    ordered, merged = [], []
    of_order = work_order.work_order
    monkeypatch.setattr(launch, "work_order", lambda *x, **y: ordered.append(y) or of_order(*x, **y))
    monkeypatch.setattr(launch, "merged_rows", lambda *x: merged.append(x) or merged_rows(*x))
    monkeypatch.setattr(work_order, "LEAST_BLOCKS", 1)
    case = chunk_with_long_rows(TARGET, 2, **(dict(q_len=32, kv_len=96) | CHUNKS[name]))
    forward = ForwardConfig(q_stages=2, num_ctas=1, tile_kv=64 if "96" in name else 128)
    check_forward(TARGET, case, config=Config(forward=forward, dq=BackwardConfig(), dkv=BackwardConfig()))
    assert ordered and bool(merged) == name.startswith("in parts")


@pytest.mark.gpu
@pytest.mark.parametrize("block_q", [16, 32])
def test_long_rows_come_first_on_hopper(block_q):
    """The rows of 64 or 128 queries are more than the workers, and the long ones longer than a worker's share."""
    sizes = dict(batch=2, q_heads=16, mask=(2, 16), kv_heads=2, q_len=500, kv_len=564)
    check_run(HOPPER, chunk_with_long_rows(HOPPER, 264 * 16 // block_q, **sizes, block_q=block_q))


@pytest.mark.parametrize("cut", [False, True])
def test_the_order_of_work(cut):
    lengths = np.random.default_rng(0).integers(0, 30, (1, 4, 33)) + 200 * (np.arange(33) > 30)
    pointers = np.concatenate([np.zeros((1, 4, 1)), lengths.cumsum(-1)], -1).astype(np.int32)
    workers, lengths = 20, lengths.reshape(1 if cut else 2, -1)
    with xsake.interpret():
        order = work_order.work_order(jnp.asarray(pointers), section=4 if cut else 2, workers=workers, cut=cut)
    items, (count,), parts_of = map(np.asarray, order)
    most = work_order.MOST_PARTS
    share = max(-(-lengths.sum() // workers), work_order.LEAST_BLOCKS)
    parts = np.clip(-(-lengths // share), 1, most) if cut else np.ones_like(lengths)
    assert count == parts[0].sum() and (parts.max() > 1) == cut
    for own, length, count_of, code in zip(items, lengths, parts, parts_of, strict=True):
        rows, numbers = own[:count] // most, own[:count] % most
        every_part = [row * most + i for row, n in enumerate(count_of) for i in range(n)]
        assert np.array_equal(np.sort(own[:count]), every_part)
        assert (np.diff(-(-length[rows] // count_of[rows])) <= 0).all(), "the longest come first"
        assert np.array_equal(code[:-1] % most, count_of - 1) and numbers.max() < count_of.max()
        slots = [first + i for first, n in zip(code[:-1] // most, count_of, strict=True) if n > 1 for i in range(n)]
        assert sorted(slots) == list(range(len(slots))) and len(slots) <= work_order.room_for_parts(workers)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("bias", [None, (1, 1, 0, 0)])
def test_a_tile_of_the_last_block_is_past_the_end(bias):
    """192 keys in blocks of 128, 64 at a time."""
    case = make(TARGET, **(SMALL | dict(q_len=16, kv_len=48, block_q=16, block_kv=32, density=1.0, bias=bias)))
    forward = ForwardConfig(tile_kv=64, q_stages=1)
    check_run(TARGET, case, config=Config(forward=forward, dq=BackwardConfig(), dkv=BackwardConfig()))


@pytest.mark.timeout(240)
def test_every_argument_float16_and_an_odd_length():
    length = 117
    rng = np.random.default_rng(0)
    case = make(
        TARGET,
        **(SMALL | dict(q_len=length, exact_lengths=True, block_q=32, block_kv=16, density=1.0)),
        bias=(1, 1, 0, 0),
        dtype="float16",
        is_causal=True,
        local_window_size=(100, None),
        segment_ids=np.sort(rng.integers(-1, 2, (1, length)), -1).astype(np.int32),
        positions=(rng.permutation(length)[None] - 2**31).astype(np.int32),  # the window ends below the least int32
        sinks=(1,),
        logits_soft_cap=2.0,
    )
    check_run(TARGET, case)


BITMAPS = {
    "per head": dict(q_len=32, block_q=16, block_kv=32, q_heads=2, kv_heads=2, mask=(1, 2)),
    "a group, causal, odd length": dict(
        q_len=117, exact_lengths=True, block_q=32, block_kv=16, q_heads=2, kv_heads=1, mask=(1, 1), mask_causal=True
    ),
    "a bit per token": dict(q_len=32, block_q=16, block_kv=32, density=1.0),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BITMAPS)
def test_bitmaps(name):
    case = make(TARGET, **(SMALL | dict(density=0.8) | BITMAPS[name]))
    shape = (*case.blocks.shape[:2], case.query.shape[1], case.key.shape[1])
    rng = np.random.default_rng(1)
    if name == "a bit per token":
        case = case.replace(chosen=rng.random((*shape[:3], case.blocks.shape[-1])) < 0.4)
    else:
        case = case.replace(elements=rng.random(shape) < 0.6)
    assert case.mask().bitmaps is not None
    check_run(TARGET, case)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_window_beyond_every_position_is_no_limit():
    case = make(
        TARGET,
        **(SMALL | dict(q_len=32, block_q=32, block_kv=32, density=1.0)),
        local_window_size=2**31 - 1,
        positions=np.arange(5, 133)[None].astype(np.int32),
    )
    check_run(TARGET, case)


# -- the threads that interpretation needs ---------------------------------------------------------------------------


def pool_threads() -> int:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return names.count("tf_XLAEigen")


def test_workers_are_the_threads_of_xlas_pool():
    jax.block_until_ready(jnp.zeros(1))
    # Threads that a kernel of an earlier test started in the pool have the pool's name, too, until they end.
    deadline = time.monotonic() + 10
    while sys.platform == "linux" and pool_threads() != cpu_workers():
        assert time.monotonic() < deadline, (pool_threads(), cpu_workers())
        time.sleep(0.05)
    assert cpu_workers() >= len(jax.devices("cpu"))


def test_a_process_with_too_few_workers_is_told_what_to_set(monkeypatch):
    monkeypatch.setattr(mosaic, "cpu_workers", lambda: 2)
    q = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    with (
        xsake.interpret(),
        pytest.raises(NotImplementedError, match=r"5 threads, and it has 2; set XLA_FLAGS=--xla_force_host"),
    ):
        xsake.attention(q, q, q, implementation="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_products_that_xla_spreads_over_its_pool():
    """With head_dim 256, waiting warpgroups hold threads of XLA's pool: two threads were too few."""
    wide = dataclasses.replace(TARGET, head_dim=256, value_dim=256)
    check_run(wide, make(wide, **(SMALL | dict(block_q=32, block_kv=32, density=1.0))))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("head_dim", [64, pytest.param(192, marks=pytest.mark.slow)])  # alone, and two that share keys
def test_gradients_of_copied_heads_are_rounded_once(head_dim):
    """Eight query heads on one K/V head, so that each gets a copy of its own; the last keys are past the end."""
    rng = np.random.default_rng(0)
    mask = xsake.BlockMask.from_blocks(np.ones((1, 1, 2), bool), block_q=64, block_kv=64, q_len=64, kv_len=100)
    shapes = ((1, 64, 8, head_dim), (1, 100, 1, head_dim), (1, 100, 1, head_dim), (1, 64, 8, head_dim))
    *given, d_out = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)

    @partial(jax.jit, static_argnums=(0, 1))
    def gradients(attend, dtype, given, d_out):
        both = jax.vjp(lambda *x: attend(*x, mask), *(x.astype(dtype) for x in given))[1]
        return [x.astype(jnp.float32) for x in both(d_out.astype(dtype))[1:]]

    truth = gradients(oracle.attention, jnp.float32, given, d_out)
    with xsake.interpret():
        found = gradients(partial(xsake.attention, implementation="mosaic_gpu"), jnp.bfloat16, given, d_out)
    for wanted, got in zip(truth, found, strict=True):
        assert np.linalg.norm(got - wanted) < 2.6e-3 * np.linalg.norm(wanted)
