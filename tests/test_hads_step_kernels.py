"""The kernels that choose blocks for new tokens on a GPU, interpreted: they give what XLA's program gives."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_offline import lower
from sweep import sweep

from xsake import hads
from xsake._ground.trace import interpret
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.rule import RULE
from xsake.hads.selection import pooled_keys
from xsake.hads.selection.gpu import step as gpu_step
from xsake.hads.selection.step import blocks as step
from xsake.hads.selection.step import mask


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    q_heads: int
    kv_heads: int
    slots: int
    lengths: tuple[int, int]
    budget: float
    window: int | None = None
    scale: float = 1.0  # of queries

    head_dim = block = 16

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.block)

    @property
    def rule(self) -> step.StepRule:
        room = int(step.counts(self.blocks, self.kv_heads, self.budget)[-1])
        return step.StepRule(self.budget, room, self.block, RULE, window=self.window)

    def given(self, seed: int = 0) -> mask._Given:
        sizes = dict(q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, block=self.block)
        rng = np.random.default_rng(seed)
        query = self.scale * rng.standard_normal((2, self.tokens, self.q_heads, self.head_dim))
        lengths = jnp.asarray(self.lengths, jnp.int32)
        empty = hads.PooledKeys.empty(batch=2, kv_heads=self.kv_heads, blocks=self.blocks, head_dim=self.head_dim)
        pooled = jax.jit(partial(empty.write, start=0, block=self.block))(self.keys(seed), lengths)
        weights = hads.LayerWeights.of(case.random_profile(**sizes), 1)
        return mask._Given(jnp.asarray(query, jnp.bfloat16), pooled, weights, lengths)

    def keys(self, seed: int = 0) -> jax.Array:
        shape = (2, self.slots, self.kv_heads, self.head_dim)
        return jnp.asarray(np.random.default_rng(seed + 1).standard_normal(shape), jnp.bfloat16)


CASES = {
    # The first sequence's tokens are in two blocks; the cache's last block is short.
    "3 tokens, 6 heads on one, a window, 37 blocks": Case(3, 6, 1, 590, (545, 101), 0.3, window=200),
    "1 token, a head each, the cache full, most blocks without mass": Case(1, 2, 2, 320, (320, 190), 0.7, scale=150.0),
    "8 tokens, more heads than a power of two": Case(8, 12, 3, 1100, (1099, 64), 0.2),
    "1 token, 2 heads on one": Case(1, 4, 2, 320, (301, 190), 0.4),
}


@pytest.mark.parametrize("name", sweep(CASES, slow=list(CASES)[1:]))
def test_blocks_are_xlas(name: str):
    of = CASES[name]
    given = of.given()
    wanted = jax.jit(partial(mask._by_xla, of.rule))(given)
    with interpret():
        got = jax.jit(partial(mask._by_kernels, of.rule))(given)
    for g, w in zip(got, wanted, strict=True):
        assert np.array_equal(g, w)
    kept = np.asarray(got[1])[..., 1].sum(-1)
    reach = step.reach_of(given.pooled, of.rule)
    inside = [int(step.blocks_inside(jnp.int32(length), of.tokens, of.block, reach)) for length in of.lengths]
    assert kept.tolist() == step.counts(of.blocks, of.kv_heads, of.budget)[inside].tolist()


def test_most_blocks_without_mass_are_tied():
    """So that the case above tells how ties are resolved."""
    of = CASES["1 token, a head each, the cache full, most blocks without mass"]
    _, gain = jax.jit(lambda x: step._sorted_gains(*x, CausalGrid(of.slots, of.block), of.blocks))(of.given())
    least = jax.lax.top_k(gain.reshape(2, -1), of.rule.room)[0][:, -1]
    assert least[0] == 0 and (gain[0] == 0).sum() > 4


def test_masses_are_xlas():
    of = CASES["3 tokens, 6 heads on one, a window, 37 blocks"]
    query, pooled, weights, lengths = of.given()
    reach = step.reach_of(pooled, of.rule)
    with interpret():
        logits = jax.jit(partial(gpu_step.logits, block=of.block, reach=reach))(
            query, pooled.features, weights.estimator, lengths
        )
    mass = np.asarray(jax.nn.softmax(logits, -1))[:, 0]
    rows = (np.asarray(of.lengths)[:, None] - of.tokens + np.arange(of.tokens)) // of.block
    for token in range(of.tokens):
        one = query[:, token : token + 1], pooled, weights, jnp.asarray(rows[:, token : token + 1], jnp.int32)
        wanted = jax.jit(partial(step._mass, reach=reach))(*one)
        np.testing.assert_allclose(mass[:, token], wanted, rtol=1e-4, atol=1e-6)


def test_the_largest_of_all_heads_are_listed():
    """Of equal gains later heads come first, and in a head the larger keys; counts are exact."""
    rng, kv_heads, n, block = np.random.default_rng(0), 3, 50, 16
    lengths, room = np.array([n * block, 300, 40], np.int32), 60
    table = np.arange(n + 1, dtype=np.int32) * 3 // 2  # of 50 blocks 75, more than there is room for
    blocks = -(-lengths // block)
    keys = (rng.integers(0, 4, (3, kv_heads, 64)) << 6) | np.arange(64)
    keys = np.where(np.arange(64) < blocks[:, None, None], keys, -1).astype(np.int32)
    in_order = np.sort(keys, -1)
    order = np.where(in_order < 0, 0, (in_order >> 6) + 1).astype(np.int32)  # four values

    def listed(keys, in_order, order, lengths):
        gains = gpu_step.Gains(keys, in_order, order)
        return gpu_step.lists(gains, table, lengths, tokens=1, block=block, reach=n, room=room)

    with interpret():
        columns, row_ptr = jax.jit(listed)(*(jnp.asarray(x) for x in (keys, in_order, order, lengths)))
    for row, number in enumerate(np.minimum(table[blocks], room)):
        heads = np.broadcast_to(np.arange(kv_heads)[:, None], order[row].shape)
        entries = zip(order[row].flat, heads.flat, in_order[row].flat, strict=True)
        largest = sorted(entries, reverse=True)[:number]
        for head in range(kv_heads):
            wanted = sorted(int(key) & 63 for _, of, key in largest if of == head)
            assert row_ptr[row, head].tolist() == [0, len(wanted)]
            assert columns[row, head].tolist() == wanted + [wanted[-1] if wanted else 0] * (n - len(wanted))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_largest_cut_is_exact(bits: int):
    rng = np.random.default_rng(bits)
    order = rng.integers(0, 2**31 - 1, 256).astype(np.int32)
    order[:9], order[9:99] = 0x7F800001, rng.integers(0, 5, 90)  # infinite gains, and ties
    cut = jax.jit(lambda order, wanted: gpu_step._largest_cut(order, wanted, bits))
    falling = np.sort(order)[::-1]
    for wanted in (1, 9, 10, 100, 200, 256):
        assert cut(order, wanted) == falling[wanted - 1]
    assert cut(order, 257) == 0


def test_the_last_blocks_are_pooled_as_by_xla():
    """In place; a sequence that is past the cache changes nothing."""
    of = CASES["3 tokens, 6 heads on one, a window, 37 blocks"]
    features = jnp.full((2, 1, of.blocks, 5, of.head_dim), 7.0)

    def pool(by: Any, *lengths: int) -> np.ndarray:
        return np.asarray(jax.jit(partial(by, of.block, 2))(features, of.keys(), jnp.asarray(lengths, jnp.int32)))

    for lengths in ((545, 590), (3, 16)):
        with interpret():
            got = pool(pooled_keys._pool_last_by_kernel, *lengths)
        np.testing.assert_allclose(got, pool(pooled_keys._pool_last_by_xla, *lengths), rtol=1e-6, atol=1e-6)
        changed = (got != 7).any((1, 3, 4))
        last = [(length - 1) // of.block for length in lengths]
        assert [np.flatnonzero(row).tolist() for row in changed] == [[*range(max(k - 1, 0), k + 1)] for k in last]
    with interpret():
        assert (pool(pooled_keys._pool_last_by_kernel, 700, 700) == 7).all()


CUDA = [(1, 12, 2, 128, 512), (3, 6, 1, 64, 37), (8, 32, 8, 128, 2048)]  # tokens, heads, KV heads, head_dim, blocks


@pytest.mark.parametrize("of", sweep(CUDA, slow=CUDA[1:]), ids=str)
def test_kernels_lower_for_cuda(of: tuple[int, int, int, int, int]):
    tokens, q_heads, kv_heads, head_dim, blocks = of
    features = jax.ShapeDtypeStruct((2, kv_heads, blocks, 5, head_dim), jnp.float32)
    keys = jax.ShapeDtypeStruct((2, blocks * 64 - 5, kv_heads, head_dim), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((2, tokens, q_heads, head_dim), jnp.bfloat16)
    weights = hads.LayerWeights.of(case.random_profile(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim), 0)
    assert mask.unsupported(64, hads.PooledKeys(features)) is None

    def everything(query, features, keys, weights, lengths):
        pooled = hads.PooledKeys(pooled_keys._pool_last_by_kernel(64, 2, features, keys, lengths))
        rule = step.StepRule(0.1, blocks * kv_heads // 10, 64, RULE)
        return mask._by_kernels(rule, mask._Given(query, pooled, weights, lengths)), pooled

    text = lower(everything, query, features, keys, weights, jax.ShapeDtypeStruct((2,), jnp.int32))
    for name in ("pool_last_blocks", "step_logits", "step_gains", "step_lists"):
        assert f"hads_{name}" in text


def test_shapes_without_kernels_are_named():
    def pooled(kv_heads: int, blocks: int, head_dim: int) -> hads.PooledKeys:
        return hads.PooledKeys(jax.ShapeDtypeStruct((1, kv_heads, blocks, 5, head_dim), jnp.float32))

    assert "head_dim=96 must be a power of two" in str(mask.unsupported(64, pooled(2, 100, 96)))
    assert "2000 blocks of 17 KV heads" in str(mask.unsupported(64, pooled(17, 2000, 64)))
