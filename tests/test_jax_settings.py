"""Calls under JAX's settings that look for mistakes: legal calls raise nothing."""

from __future__ import annotations

from functools import partial

import hads_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_reads import only_explicit_reads
from sweep import sweep

import xsake
from xsake import hads
from xsake.testing.case import attend, check, collect, make, with_grads
from xsake.testing.reference import Results


def cases(implementation):
    """Cases by name; only those with "empty rows" in the name have empty rows."""
    n = implementation.size(39)
    lengths = np.array([n - 5, n], np.int32)
    small = dict(q_len=39, q_heads=2, kv_heads=1, mask=(1, 2), density=1.0)
    return {
        "mask, bias and sinks": make(implementation, **small, mask_causal=True, bias=(1, 1, 0, 0), sinks=(2,)),
        "no mask": make(implementation, **(small | {"mask": None}), is_causal=True, logits_soft_cap=3.0),
        "empty rows": make(implementation, **(small | {"density": 0.3}), query_seq_lengths=lengths),
    }


NAMES = ["mask, bias and sinks", "no mask", "empty rows"]


def eager(implementation, case):
    """Output and gradients without jit; no lse, which is -inf in empty rows."""
    mask = case.mask()

    def loss(inputs):
        out = xsake.attention(**inputs, **case.rest, mask=mask, **case.options, implementation=implementation.name)
        return (out.astype(jnp.float32) * case.d_out.astype(np.float32)).sum(), out

    with implementation.context():
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(case.inputs)
    return out, grads


@pytest.mark.parametrize("name", sweep(NAMES, slow=["mask, bias and sinks", "no mask"]))
def test_debug_infs_and_nans_without_jit(implementation, name):
    """The -inf of masked logits and of empty rows is no mistake."""
    case = cases(implementation)[name]
    case = case.replace(d_lse=np.zeros_like(case.d_lse))
    with jax.debug_infs(True), jax.debug_nans(True):
        out, grads = eager(implementation, case)
    check(case, Results(np.asarray(out), None, **{f"d_{k}": np.asarray(v) for k, v in grads.items()}))


def test_debug_infs_reports_an_lse_that_is_infinite():
    case = cases(_xla())["empty rows"]
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        attend(_xla(), case.inputs, case.mask(), case.rest)


def test_debug_infs_reports_what_is_wrong():
    case = cases(_xla())["no mask"]
    value = case.value.copy()
    value[0, 3] = np.inf
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        eager(_xla(), case.replace(value=value))


def _xla():
    from targets import TARGETS

    return TARGETS[0]


@pytest.mark.usefixtures("interpreter_without_effects")
@pytest.mark.parametrize("name", sweep(NAMES, slow=["mask, bias and sinks", "empty rows"]))
def test_tracing_transfers_nothing_unasked(implementation, name):
    """Neither the mask of a call that gives none, which is made while tracing, nor one that the caller gives."""
    case = cases(implementation)[name]
    given = jax.device_put((case.inputs, case.rest, case.cotangents))
    mask = None if case.blocks is None else jax.device_put(case.mask())

    def everything(mask, inputs, rest, cotangents):
        return with_grads(lambda x: attend(implementation, x, mask, rest, **case.options), inputs, cotangents)

    with implementation.context(), jax.transfer_guard("disallow"), only_explicit_reads():
        # Arrays that a function closes over are copied by JAX itself, when it lowers: only the tracing is ours.
        jax.jit(partial(everything, mask)).trace(*given)
        results = jax.jit(everything)(mask, *given)
    check(case, collect(case, *results))


@pytest.mark.usefixtures("interpreter_without_effects")
@pytest.mark.parametrize("name", sweep(NAMES, slow=["no mask", "empty rows"]))
def test_a_call_outside_jit_reads_nothing_unasked(implementation, name):
    case = cases(implementation)[name]
    case = case.replace(d_lse=np.zeros_like(case.d_lse))
    with jax.transfer_guard_device_to_host("disallow"), only_explicit_reads():
        out, grads = eager(implementation, case)
    check(case, Results(np.asarray(out), None, **{f"d_{k}": np.asarray(v) for k, v in grads.items()}))


def test_a_pattern_made_under_jit_transfers_nothing_unasked():
    """Its lists are constants of the program: on the device they would be copied back when the program is lowered."""
    q = jax.device_put(np.ones((1, 256, 1, 16), np.float32))

    @jax.jit
    def window(q):
        mask = xsake.patterns.sink_window(256, 256, sink=64, window=64, block_q=64, block_kv=64)
        assert not mask.traced
        return xsake.attention(q, q, q, mask, implementation="xla")

    with jax.transfer_guard("disallow"), only_explicit_reads():
        window(q).block_until_ready()


def test_checks_of_concrete_arguments_read_them_explicitly():
    """What is refused by its contents is read by `jax.device_get`, which guards of transfers allow."""
    q = jnp.ones((1, 128, 2, 16))
    ids, chosen = jnp.zeros((1, 128), jnp.int32), jnp.zeros((1, 128, 2, 1), jnp.int32)
    sizes = dict(block_q=64, block_kv=64, q_len=128, kv_len=128)
    blocks, bounds, table = jnp.ones((2, 2), bool), jnp.array([0, 50, 128]), jnp.array([[1, 0]])
    with jax.transfer_guard_device_to_host("disallow"), only_explicit_reads():
        mask = xsake.BlockMask.from_blocks(blocks, **sizes)
        xsake.BlockMask.from_indices(jnp.array([[0, -1], [0, 1]]), **sizes)
        xsake.BlockMask.from_token_indices(chosen, jnp.ones((1, 128, 2), jnp.int32), block_kv=64)
        xsake.patterns.documents(ids, block_q=64, block_kv=64)
        xsake.patterns.prefix_lm(128, 128, prefix=jnp.array([70]), block_q=64, block_kv=64)
        mask.shard_rows(2).most_to_send(1)
        xsake.selected_attention(q, q, q, chosen, block_size=64, cu_seqlens=bounds)
        xsake.attention(q, q.reshape(2, 64, 2, 16), q.reshape(2, 64, 2, 16), page_table=table, implementation="xla")


def test_masks_are_made_and_read_without_unasked_transfers():
    with jax.transfer_guard("disallow"):
        mask = xsake.patterns.sink_window(256, 256, sink=64, window=64, block_q=64, block_kv=64)
        assert 0 < mask.density() <= 1 and mask.to_blocks().shape == (1, 1, 4, 4) and not mask.overflowed().any()
        assert "256 x 256" in repr(mask) and str(mask)


def test_hads_promotes_no_rank_and_transfers_nothing_unasked():
    profile = hads_case.random_profile()
    query, key = jax.device_put(hads_case.random_inputs(0, 250, profile, batch=2))
    with jax.transfer_guard("disallow"):
        mask = jax.jit(lambda query, key: hads.select(query, key, profile, 0.7, layer=1))(query, key)
    assert mask.batch == 2 and (mask.density(per_head=True) > 0).all()
