"""The kernels that make a mask on a GPU, interpreted: they give what XLA's program gives for the same inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import hads_case as case
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_offline import lower
from hypothesis import given
from sweep import sweep

from xsake import BlockMask, hads
from xsake._ground.trace import interpret
from xsake.hads.mask.lists import compact, triton_compact
from xsake.hads.mask.lists.rows import finished
from xsake.hads.mask.lists.triton_call import pad, padded
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator, bucket_of
from xsake.hads.profile.rule import RULE, Rule
from xsake.hads.selection import choice, estimate, exact, program
from xsake.hads.selection.cut import Cut
from xsake.hads.selection.gpu import choose as gpu_choose
from xsake.hads.selection.gpu import estimate as gpu_estimate
from xsake.hads.selection.gpu import exact as gpu_exact
from xsake.hads.selection.gpu.sort import sort_rows
from xsake.hads.selection.pooled import pool
from xsake.hads.selection.program import unsupported
from xsake.hads.selection.rows import Rows


@given(st.integers(0, 2**32 - 1), st.sampled_from([64, 256, 2048]), st.booleans())
def test_rows_are_sorted(seed: int, width: int, few_values: bool):
    high = 5 if few_values else 2**31 - 1
    rows = np.random.default_rng(seed).integers(-1, high, (3, width)).astype(np.int32)
    assert np.array_equal(_sort(rows), np.sort(rows, -1))


_sort = jax.jit(sort_rows)


# -- the estimate ----------------------------------------------------------------------------------------------------

SHAPES = {  # length, query heads, KV heads, head_dim, block, block_q
    "two heads together, more than a tile of rows": (1088, 4, 2, 16, 16, 16),
    "three heads on one": (320, 3, 1, 32, 16, 16),
    "a head each, blocks of 64, the last one short": (600, 2, 2, 16, 64, 64),
    "tall rows, the last one short": (2250, 4, 2, 16, 16, 32),
}


def estimates(query: Any, key: Any, estimator: Estimator, grid: CausalGrid) -> tuple[np.ndarray, np.ndarray]:
    """(the kernels' estimate, XLA's estimate), 0 where causality forbids."""
    with interpret():
        got = jax.jit(partial(gpu_estimate.block_logits, rows=Rows(grid)))(query, key, estimator)
    wanted = jax.jit(lambda *x: estimate.block_logits(pool(*x, grid), estimator, Rows(grid)))(query, key)
    got = got[..., : grid.rows, : grid.columns]
    return np.where(grid.causal(), got, 0), np.where(grid.causal(), wanted, 0)


@pytest.mark.parametrize(
    "name", sweep(SHAPES, slow=["three heads on one", "a head each, blocks of 64, the last one short"])
)
def test_logits_are_xlas(name: str):
    length, q_heads, kv_heads, head_dim, block, block_q = SHAPES[name]
    profile = case.random_profile(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, block=block, block_q=block_q)
    query, key = (jnp.asarray(x) for x in case.random_inputs(3, length, profile, batch=2))
    got, wanted = estimates(query, key, profile.estimator(1), profile.grid(length))
    np.testing.assert_allclose(got, wanted, atol=0.02)  # of products of 16-bit numbers


def test_logits_of_hundreds_stay_finite_and_right():
    profile = case.random_profile(head_dim=16)
    query, key = case.random_inputs(3, 512, profile)
    key[:, 100] *= 60  # one key that stands out
    key[:, 200:] *= 30
    got, wanted = estimates(jnp.asarray(query), jnp.asarray(key), profile.estimator(0), CausalGrid(512, 16))
    assert np.abs(wanted).max() > 250
    np.testing.assert_allclose(got, wanted, atol=2**-8 * np.abs(wanted).max())  # of 16-bit numbers


# -- exact rows ------------------------------------------------------------------------------------------------------

ANSWERS = ((400, 690, 720), (340, 500, 0), (0, 0, 320))
EXACT_ROWS: dict[
    str, tuple
] = {  # tokens, first row of blocks, lengths, queries; query heads, KV heads, head_dim, block, block_q
    "of a sequence, its last block short": ((1270, 0, None, 40), (4, 2, 16, 16, 16)),
    "one block of queries": ((640, 0, None, 64), (2, 2, 32, 64, 64)),
    "of a chunk, in which sequences end or not": ((700, 20, (2000, 650, 330, 300), 50), (4, 2, 16, 16, 16)),
    "of a chunk that begins after the first of them": ((704, 43, (704, 690, 720, 0), 64), (3, 1, 16, 16, 16)),
    "tall rows of a sequence": ((1270, 0, None, 40), (4, 2, 16, 16, 64)),
    "tall rows of a chunk": ((690, 5, (2000, 650, 330, 321, 300, 0), 50), (4, 2, 16, 16, 64)),
    "before answers, some outside the chunk": ((704, 20, (2000, 650, 330), 50), (4, 2, 16, 16, 16), ANSWERS),
    "before answers, tall rows": ((704, 5, (2000, 650, 330), 50), (4, 2, 16, 16, 64), ANSWERS),
}


@pytest.mark.parametrize(
    "name", sweep(EXACT_ROWS, slow=["one block of queries", "tall rows of a sequence", "before answers, tall rows"])
)
def test_exact_rows_are_xlas(name: str):
    (end, first, lengths, queries), (heads, kv_heads, head_dim, block, block_q), *answers = EXACT_ROWS[name]
    grid = CausalGrid(end, block, Rule(exact_queries=queries), block_q=block_q)
    ends = [jnp.array(x, jnp.int32) for x in ([] if lengths is None else [lengths, *answers])]
    rows = Rows(grid, first, *ends)
    profile = case.random_profile(q_heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block)
    query, key = (jnp.asarray(x) for x in case.random_inputs(4, end + 5, profile, batch=len(lengths or "ab")))
    query, key = query[:, first * block_q : end], key.at[:, end:].set(jnp.nan)  # a cache holds anything past its end
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((len(query), heads, rows.number, rows.grid.columns)))

    def normalised(logits: Any) -> Any:
        return jax.nn.softmax(jnp.where(rows.allowed(), logits[:, :, : rows.number, : rows.grid.columns], -1e30), -1)

    wanted = jax.jit(lambda *x: exact.with_exact_rows(normalised(x[0]), *x[1:], rows))(logits, query, key)
    with interpret():
        got = normalised(jax.jit(lambda *x: gpu_exact.with_exact_rows(*x, rows))(pad(logits), query, key))
    there = np.broadcast_to(rows.allowed().any(-1, keepdims=True), wanted.shape)
    np.testing.assert_allclose(np.where(there, got, 0), np.where(there, wanted, 0), rtol=1e-4, atol=1e-6)
    changed = (np.abs(got - normalised(logits)).max((1, -1)) > 1e-6) & there[:, 0, :, 0]
    assert np.array_equal(changed, (rows.exact_mask() & there)[:, 0, :, 0])


# -- the rule --------------------------------------------------------------------------------------------------------


def rule(seed: int, heads: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    omega, phi = np.exp(rng.standard_normal(heads)), 0.05 * rng.random(heads)
    return {"sensitivity": jnp.asarray(omega, jnp.float32), "burstiness": jnp.asarray(phi, jnp.float32)}


def of_few_values(grid: CausalGrid, batch: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Logits and their masses; many gains are equal, within a row and between rows."""
    drawn = 2 * np.random.default_rng(0).standard_normal((batch, 3, grid.rows, grid.columns))
    logits = np.round(drawn).astype(np.float32)
    return logits, np.asarray(jax.nn.softmax(np.where(grid.causal(), logits, -np.inf), -1))


WHOLE, OTHER = (630, 0, None), Rule(sink_blocks=2, near_blocks=3, dense_rows=2, last_rows=5, last_weight=2.5)
SHARDS, TALL = Cut(4, "zigzag"), Rule.of_blocks(4)
# The first sequence of a chunk may go on after the chunk; others end inside the chunk or before it.
# end, first row of blocks, lengths, block_q if it is not the block; rule; kept; answers
CHOICES: dict[str, tuple] = {
    "all heads together": (WHOLE, OTHER, {"count": 900}),
    "a number per head": (WHOLE, RULE, {"count": np.array([250, 400, 300])}),
    "a threshold": (WHOLE, OTHER, {"threshold": 1e-3}),
    "equal counts of shards": (WHOLE, RULE, {"count": 500, "cut": SHARDS}),
    "equal counts per head": (WHOLE, RULE, {"count": np.array([150, 200, 150]), "cut": SHARDS}),
    "a chunk": ((1024, 48, (2000, 470, 300)), RULE, {"count": np.array([[525], [0], [0]])}),
    "a chunk, its last block short": ((630, 20, (630, 470, 300)), RULE, {"count": np.array([[525], [300], [0]])}),
    "a chunk of all rows": ((630, 0, (630, 470, 300)), RULE, {"count": np.array([[525], [300], [225]])}),
    "a chunk of one row": ((1024, 63, (1024, 470, 300)), RULE, {"count": np.array([[75], [0], [0]])}),
    "a chunk with answers": (
        (630, 20, (630, 470, 330)),
        RULE,
        {"count": np.array([[525], [300], [40]])},
        ((400, 620), (340, 0), (0, 0)),
    ),
    "tall rows": ((1630, 0, None, 64), OTHER, {"count": 1500}),
    "tall rows, a threshold": ((1630, 0, None, 64), OTHER, {"threshold": 1e-3}),
    "tall rows, equal counts of shards": ((1630, 0, None, 64), TALL, {"count": 1500, "cut": SHARDS}),
    "a chunk of tall rows": (
        (1630, 10, (2630, 1470, 720, 640, 0), 64),
        TALL,
        {"count": np.array([[1500], [1000], [200], [0], [0]])},
    ),
}


@pytest.mark.parametrize(
    "name", sweep(CHOICES, slow=set(CHOICES) - {"a number per head", "a chunk with answers", "a chunk of tall rows"})
)
def test_choice_is_xlas(name: str):
    (end, first, lengths, *block_q), constants, kept, *answers = CHOICES[name]
    grid, lengths = (
        CausalGrid(end, 16, constants, None, *block_q),
        None if lengths is None else jnp.array(lengths, jnp.int32),
    )
    mass = jnp.asarray(of_few_values(grid, batch=2 if lengths is None else len(lengths))[1][:, :, first:])
    rows = Rows(grid, first, lengths, *(jnp.array(x, jnp.int32) for x in answers))
    given, few = rule(1, 3) | kept, 200  # too few slots for some heads

    @jax.jit
    def ours(mass):
        picked = gpu_choose.choose(pad(mass), rows, normalise=False, **given)
        return picked.blocks(rows), picked.lists(rows, few), picked.finished_lists(rows, few)

    @jax.jit
    def xlas(mass):
        blocks = choice.choose(mass, rows, **given)
        lists = compact.compact(blocks, grid.full()[first:], few + 1)
        return blocks, compact.compact(blocks, grid.full()[first:], few), finished(jnp, *lists)

    with interpret():
        got, lists, whole_lists = ours(mass)
    wanted, wanted_lists, wanted_whole = xlas(mass)
    assert np.array_equal(got, wanted)
    if lengths is not None:
        assert got.sum((1, 2, 3)).tolist() == kept["count"][:, 0].tolist()
    for g, w in zip(case.used_slots(*lists), case.used_slots(*wanted_lists), strict=True):
        assert np.array_equal(g, w)
    # The spare slot of a list that does not fit may name any block.
    same = (np.arange(few + 1) < few) | (np.asarray(whole_lists[1])[..., -1:] < few)
    assert np.array_equal(np.where(same, whole_lists[0], 0), np.where(same, wanted_whole[0], 0))
    for g, w in zip(whole_lists[1:], wanted_whole[1:], strict=True):
        assert np.array_equal(g, w)


def test_nothing_is_read_outside_the_triangle():
    grid = CausalGrid(630, 16)
    logits, mass = of_few_values(grid)
    given = rule(1, 3) | {"threshold": 1e-3}
    wanted = np.asarray(jax.jit(lambda mass: choice.choose(mass, Rows(grid), **given))(jnp.asarray(mass)))
    garbage = np.full((2, 3, *padded(grid.columns)), np.nan, np.float32)
    garbage[..., : grid.columns, : grid.columns] = np.where(grid.causal(), logits, np.nan)
    with interpret():
        got = jax.jit(lambda logits: gpu_choose.choose(logits, Rows(grid), **given).blocks(Rows(grid)))(
            jnp.asarray(garbage)
        )
    assert (got != wanted).sum() <= 4  # masses may differ in their last bit


# -- lists -----------------------------------------------------------------------------------------------------------


LISTS = [(9, 13, 200, 0.3), (3, 70, 5, 0.5)]  # rows, columns, capacity, density


@pytest.mark.parametrize("of", sweep(LISTS, slow=LISTS[:1]), ids=str)
def test_lists_are_xlas(of: tuple[int, int, int, float]):
    rows, columns, capacity, density = of
    rng = np.random.default_rng(0)
    active, full = jnp.asarray(rng.random((2, 1, rows, columns)) < density), rng.random((rows, columns)) < 0.7
    wanted = case.used_slots(*jax.jit(lambda active: compact.compact(active, full, capacity))(active))
    with interpret():
        got = case.used_slots(*jax.jit(lambda active: triton_compact.compact(active, full, capacity))(active))
    for g, w in zip(got, wanted, strict=True):
        assert np.array_equal(g, w)


# -- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # estimate, choice and lists are compared above, each by itself
@pytest.mark.parametrize(("heads", "block_q"), [(4, 16), (2, 16), (4, 64), (2, 64)])
def test_blocks_are_xlas(heads: int, block_q: int):
    profile, length = case.random_profile(head_dim=16, block_q=block_q), 512
    grid = profile.grid(length)
    query, key = (jnp.asarray(x) for x in case.random_inputs(5, length, profile))
    kept = {"count": jnp.int32(0.3 * heads * grid.blocks)}
    inputs = jax.tree.map(jnp.asarray, program.Given(query, key, *profile.weights(0), kept))
    wanted = np.asarray(program._by_xla(grid, heads, None, inputs))
    with interpret():
        got = np.asarray(program._by_kernels(grid, heads, None, inputs))
    assert got.sum() == wanted.sum() == int(0.3 * heads * grid.blocks)
    assert (got & wanted).sum() > 0.99 * wanted.sum()


CUDA = [  # chip, dtype, length, head_dim, block, block_q
    ("sm_80", "float16", 32768, 64, 128, 128),
    ("sm_80", "float32", 4000, 128, 64, 64),
    ("sm_90", "bfloat16", 32768, 128, 64, 64),
    ("sm_90", "bfloat16", 32768, 128, 32, 128),
]


@pytest.mark.parametrize("of", sweep(CUDA, slow=CUDA[:2]), ids=str)
def test_kernels_lower_for_cuda(of: tuple[str, str, int, int, int, int]):
    chip, dtype, length, head_dim, block, block_q = of
    profile = case.random_profile(head_dim=head_dim, block=block, block_q=block_q, q_heads=8)
    grid = profile.grid(length)
    assert unsupported(head_dim, grid) is None
    avals = (jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.dtype(dtype)) for heads in (8, 2))
    make = partial(program._by_kernels, grid, 8, 100)
    text = lower(make, program.Given(*avals, *profile.weights(0), {"count": jnp.int32(1000)}), chip=chip)
    for name in case.KERNELS:
        assert f"hads_{name}" in text


def test_shapes_without_kernels_are_named():
    assert "head_dim=96 must be a power of two" in str(unsupported(96, CausalGrid(1024, 64)))
    assert "block_q=256" in str(unsupported(64, CausalGrid(1024, 64, block_q=256)))
    assert "block=256" in str(unsupported(64, CausalGrid(1024, 256)))
    assert "16384 blocks per row" in str(unsupported(64, CausalGrid(1048576, 64)))
    assert unsupported(128, CausalGrid(1048576, 128)) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_of_8192_blocks_are_chosen_as_by_xla():
    """The last rows of a long prompt, as of its last chunk; a million tokens in blocks of 128 have rows as long."""
    grid, first = CausalGrid(131072, 16), 8189
    rows, count = Rows(grid, first, jnp.array([131072], jnp.int32)), jnp.array([[3000]], jnp.int32)
    logits = np.random.default_rng(0).normal(scale=3, size=(1, 2, 64, 8192)).astype(np.float32)
    rule = dict(sensitivity=jnp.array([1.0, 2.0]), burstiness=jnp.array([0.1, 0.2]), count=count)
    with interpret():
        found = jax.jit(lambda x: gpu_choose.choose(x, rows, **rule).blocks(rows))(logits)
    mass = jax.nn.softmax(jnp.where(grid.causal()[first:], logits[:, :, : rows.number], -jnp.inf), -1)
    np.testing.assert_array_equal(found, choice.choose(mass, rows, **rule))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 5000, 32768])
@pytest.mark.parametrize(("block", "block_q"), [(64, 64), (128, 128), (32, 128), (16, 64)])
def test_mask_on_a_gpu_is_xlas(length: int, block: int, block_q: int):
    profile = case.random_profile(q_heads=8, kv_heads=2, head_dim=128, block=block, block_q=block_q)
    query, key = (jnp.asarray(x, jnp.bfloat16) for x in case.random_inputs(5, length, profile, batch=2))
    grid, counts = profile.grid(length), hads.layer_counts(profile, 0.3, length)
    wanted = jax.jit(partial(program._by_xla, grid, 8, None))(
        program.Given(query, key, *profile.weights(1), {"count": int(counts[1])})
    )
    mask: BlockMask = jax.jit(partial(hads.select, profile=profile, budget=0.3, layer=1))(query, key)
    rows: BlockMask = jax.jit(partial(hads.select, profile=profile, budget=0.3, layer=1, transpose=False))(query, key)
    for name in ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order"):
        assert np.array_equal(getattr(rows, name), getattr(mask, name)), name
    got, wanted = np.asarray(mask.to_blocks()), np.asarray(wanted)
    assert (got.sum((1, 2, 3)) == counts[1]).all()
    assert (got & wanted).sum() > 0.99 * wanted.sum()


def test_buckets_by_bits():
    distance = np.concatenate([np.arange(-3, 2000), [4095, 4096, 6143, 6144, 12287, 12288, 16383, 16384, 40000]])
    assert np.asarray(gpu_estimate._bucket(jnp.asarray(distance, jnp.int32))).tolist() == bucket_of(distance).tolist()
