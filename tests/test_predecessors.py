"""Cases that earlier block-sparse attention systems computed wrongly: forward and all gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executed import counting_matmul_flops
from sweep import sweep

import xsake
from xsake._measure.timing import race
from xsake.testing.case import check, check_run, compiled, make, run
from xsake.testing.reference import attends


def test_predecessor_any_blocks_per_head(implementation):
    """Not one contiguous interval per row, and not one for all heads: a different comb for each head."""
    case = make(implementation, mask=(1, 4), block_q=16, block_kv=16, density=1.0, q_len=120)
    i, j = np.indices(case.blocks.shape[-2:])
    blocks = np.stack([(i + j) % 2 == 0, j % 3 == 0, i == j, (i * 5 + j) % 4 == 1])[None]
    check_run(implementation, case.replace(blocks=blocks))


def test_predecessor_a_mask_reaches_every_head(implementation):
    """The mask of head 0 was used for all."""
    case = make(implementation, mask=(1, 4), density=0.0)
    blocks = case.blocks.copy()
    blocks[0, 3] = True
    results = check_run(implementation, case.replace(blocks=blocks))
    assert (results.out[:, :, :3] == 0).all() and (results.out[:, :, 3] != 0).any()


def test_predecessor_positions_not_index_causal(implementation):
    """Causality by index was added on top of positions. Reversed tokens see only what lies after them by index."""
    n = implementation.size(75)
    reverse = np.arange(n, dtype=np.int32)[::-1][None].repeat(2, 0)
    case = make(implementation, q_len=75, mask=(1, 4), density=0.8, is_causal=True, positions=reverse)
    by_index = np.tri(n, k=-1, dtype=bool)
    assert attends(case).any() and not (attends(case) & by_index).any()
    check_run(implementation, case)


@pytest.mark.slow  # test_any_mask_lengths_segments_and_positions has such a window
def test_predecessor_window_follows_positions(implementation):
    rng = np.random.default_rng(1)
    n = implementation.size(75)
    positions = np.stack([rng.permutation(n) for _ in range(2)]).astype(np.int32) * 3
    case = make(implementation, q_len=75, mask=(1, 4), density=0.8, local_window_size=(17, 40), positions=positions)
    check_run(implementation, case)


@pytest.mark.parametrize("shape", sweep([(4,), (4, 5)], slow=[(4,)]))
def test_predecessor_sinks_counted_once(implementation, shape):
    """Sinks were counted once per KV block, and had no gradient. Many blocks per row, and large sinks."""
    case = make(implementation, block_q=16, block_kv=16, mask=(1, 4), density=0.9, sinks=shape)
    case = case.replace(arguments={"sinks": case.arguments["sinks"] + 2})
    results = check_run(implementation, case)
    assert (np.abs(results.d_sinks) > 0).all()


@pytest.mark.parametrize("window", sweep([5, (37, 0), (0, 23)], slow=[(37, 0), (0, 23)]))
def test_predecessor_unaligned_window(implementation, window):
    check_run(
        implementation, make(implementation, q_len=123, block_q=32, block_kv=32, mask=None, local_window_size=window)
    )


def test_predecessor_soft_cap_jacobian(implementation):
    """Logits well into the cap, a scale that is not 1: dQ and dK were wrong by scale * log2(e)."""
    check_run(
        implementation, make(implementation, logits_soft_cap=1.0, scale=0.7, spread=1.5, mask_causal=True, density=0.8)
    )


def test_predecessor_key_gradient_and_last_block_s_causality(implementation):
    """dK was off by scale * log2(e), and the last KV block lost causality."""
    case = make(
        implementation, q_len=70, block_q=16, block_kv=16, mask=(1, 4), density=1.0, mask_causal=True, scale=0.31
    )
    results = check_run(implementation, case)
    alone = case.replace(d_out=np.zeros_like(case.d_out), d_lse=np.zeros_like(case.d_lse))
    alone.d_out[:, : implementation.size(64)] = 1.0  # queries before the last block give its keys nothing
    results = run(implementation, alone)
    check(alone, results)
    last = np.s_[:, implementation.size(64) :]
    assert (results.d_key[last] == 0).all() and (results.d_value[last] == 0).all()


def test_predecessor_forward_tiles_differ_from_backward_tiles(implementation):
    """Such configurations read out of bounds, at lengths that no tile divides."""
    case = make(implementation, q_len=77, kv_len=101, mask=(1, 4), density=0.7, mask_causal=True)
    check_run(implementation, case, config=implementation.configs(case)[1])


@pytest.mark.parametrize(
    "name", ["chunk_size", "mask_builder", "qkv_layouts", "softmax_aux", "attention_mask", "causal", "dropout"]
)
def test_predecessor_no_argument_is_ignored(name):
    x = jnp.ones((1, 8, 1, 8))
    with pytest.raises(TypeError, match=name):
        xsake.attention(x, x, x, **{name: 1})


def test_predecessor_empty_rows_are_zero(implementation):
    """Non-finite on an earlier TPU kernel. Rows that are empty by list, by rule and by length at once."""
    n = implementation.size(75)
    case = make(
        implementation,
        q_len=75,
        density=0.4,
        mask=(2, 4),
        local_window_size=(None, 0),
        query_seq_lengths=np.array([n - 9, n], np.int32),
        key_value_seq_lengths=np.array([n, 20], np.int32),
    )
    results = check_run(implementation, case)
    empty = ~attends(case).any(-1).swapaxes(1, 2)
    assert empty.any()
    assert (
        (results.out[empty] == 0).all()
        and (results.d_query[empty] == 0).all()
        and (results.lse[empty] == -np.inf).all()
    )


def test_predecessor_padding_queries_do_not_attend_padding_keys(implementation):
    n = implementation.size(75)
    ids = np.full((2, n), -1, np.int32)
    ids[:, 10:40] = 0
    results = check_run(implementation, make(implementation, q_len=75, density=1.0, segment_ids=ids))
    padding = ids < 0
    assert (
        (results.out[padding] == 0).all()
        and (results.lse[padding] == -np.inf).all()
        and (results.d_key[padding] == 0).all()
    )


@pytest.mark.slow  # the test above has rows of nothing but padding
def test_predecessor_all_padding(implementation):
    n = implementation.size(39)
    results = check_run(implementation, make(implementation, q_len=39, segment_ids=np.full((2, n), -1, np.int32)))
    assert not results.out.any() and not results.d_value.any()


ONCE_DENSE = {
    "one query": dict(q_len=1, kv_len=129, exact_lengths=True),
    "odd length, unequal head dims": dict(q_len=63, exact_lengths=True, head_dim=16, value_dim=24),
    "one head is not decoding": dict(q_len=50, q_heads=1, kv_heads=1, mask=(1, 1), is_causal=True),
}


@pytest.mark.parametrize("name", sweep(ONCE_DENSE, slow=["one query", "one head is not decoding"]))
def test_predecessor_no_dense_fallback_is_needed(implementation, name):
    check_run(implementation, make(implementation, **ONCE_DENSE[name]))


@pytest.mark.slow  # test_half_precision is the same at another length
def test_predecessor_bfloat16_backward(implementation):
    case = make(implementation, dtype="bfloat16", q_len=75, mask_causal=True, density=0.8)
    check_run(implementation, case)


def _long(implementation, density, length):
    block = max(32 // implementation.unit, 16)
    return make(
        implementation,
        batch=1,
        q_len=length,
        exact_lengths=True,
        q_heads=2,
        kv_heads=2,
        mask=(1, 2),
        density=density,
        block_q=block,
        block_kv=block,
    )


def test_predecessor_memory_follows_active_blocks(implementation):
    """No [T, S] array at any time: temporary memory far below one float32 logit for each pair of tokens."""
    if implementation.interpret:
        pytest.skip("an interpreter's memory says nothing")
    case = _long(implementation, 0.05, 4096)
    with implementation.context():
        program = compiled(implementation, None, ()).lower(case.inputs, case.mask(), {}, case.cotangents).compile()
    dense = 2 * 4096 * 4096 * 4
    used = program.memory_analysis().temp_size_in_bytes
    assert used < 0.3 * dense, (
        f"{used / 1e6:.1f} MB of temporaries; one [T, S] array a head would be {dense / 1e6:.1f} MB"
    )


def test_predecessor_blocks_are_skipped_not_discarded(implementation):
    """The same function, forward and backward, on few of the blocks does a small part of the work."""
    if implementation.interpret:
        pytest.skip("an interpreter's time says nothing")
    function, work = compiled(implementation, None, ()), {}
    on_cpu = jax.default_backend() == "cpu"
    with implementation.context():
        for density in (0.03, 1.0):
            # Long enough that launching a kernel is not what is measured.
            case = _long(implementation, density, 1024 if on_cpu else 16384)
            mask = case.mask(capacity=case.blocks.shape[-1] ** 2, density_hint=0.5)
            work[density] = (function, case.inputs, mask, {}, case.cotangents)
        if on_cpu:
            count = counting_matmul_flops(function)
            sparse, dense = (float(count(*of)) for _, *of in work.values())
            assert 0 < sparse < 0.2 * dense
        else:  # a kernel's work cannot be counted from outside: both in turn, in one run
            times = race({str(d): lambda f=f, x=x: f(*x) for d, (f, *x) in work.items()})
            assert times["0.03"].median < 0.5 * times["1.0"].median, times
