"""Patterns that are exact to the token by bitmaps: packed documents, prefixes, and the mask_mods of attention-gym."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import xsake
from xsake.kernels_xla_ref import oracle


@pytest.mark.parametrize("traced", sweep([False, True], slow=[True]))
def test_packed_documents_skip_blocks(traced):
    """16 documents in 2048 tokens: 33 of 136 causal blocks for these lengths; segment ids alone visit them all."""
    lengths = np.random.default_rng(4).multinomial(2048, np.ones(16) / 16)
    segments = np.repeat(np.arange(16, dtype=np.int32), lengths)
    build = jax.jit(xsake.patterns.documents) if traced else xsake.patterns.documents
    mask = build(segments)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    needed = sum(i - starts[i * 128] // 128 + 1 for i in range(16))
    assert int(mask.to_blocks().sum()) == needed == 33
    assert int(xsake.patterns.causal(2048, 2048).to_blocks().sum()) == 136


@pytest.mark.parametrize("is_causal", sweep([True, False], slow=[False]))
@pytest.mark.parametrize("traced", [False, True])
def test_documents(traced, is_causal):
    rng = np.random.default_rng(0)
    ids = np.stack([np.sort(rng.integers(0, 4, 90)), rng.integers(-1, 3, 90)]).astype(np.int32)
    options = dict(block_q=16, block_kv=32, is_causal=is_causal)
    build = (
        jax.jit(lambda ids: xsake.patterns.documents(ids, **options))
        if traced
        else (lambda ids: xsake.patterns.documents(ids, **options))
    )
    expected = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    if is_causal:
        expected &= np.tri(90, dtype=bool)
    assert (build(ids).to_elements() == expected[:, None]).all()
    one, other = ids[0], ids[1][:50]
    pair = xsake.patterns.documents((one, other), **(options | {"is_causal": False}))
    assert (pair.to_elements()[0, 0] == ((one[:, None] == other[None]) & (other >= 0)[None])).all()


@pytest.mark.parametrize("traced", sweep([False, True], slow=[True]))
def test_prefix_lm(traced):
    prefix = np.array([0, 37, 96], np.int32)

    def build(prefix):
        return xsake.patterns.prefix_lm(100, 96, prefix=prefix, block_q=16, block_kv=32)

    mask = (jax.jit(build) if traced else build)(prefix)
    q, k = np.arange(100)[:, None], np.arange(96)[None]
    assert (mask.to_elements()[:, 0] == ((k <= q) | (k < prefix[:, None, None]))).all()
    assert int(np.asarray(build(37).to_blocks()).sum()) < 7 * 3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: xsake.patterns.documents(np.zeros(4)), "segment_ids must be integers"),
        (lambda: xsake.patterns.documents(np.zeros((1, 2, 3), int)), r"segment_ids must be \[T\] or \[B, T\]"),
        (lambda: xsake.patterns.documents((np.zeros((2, 4), int), np.zeros((3, 4), int))), "which must be equal or 1"),
        (lambda: xsake.patterns.prefix_lm(4, 4, prefix=1.5), "prefix must be an int"),
        (lambda: xsake.patterns.prefix_lm(4, 4, prefix=-1), "prefix=-1 must not be negative"),
    ],
)
def test_wrong_patterns_are_refused(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


# -- the mask_mods of attention-gym ----------------------------------------------------------------------------------

T = 96
DOCUMENT = np.repeat([0, 1, 2], [30, 50, 16])
PARENT = np.array([0, *((np.arange(1, T) - 1) // 2)])  # a binary tree, a token per node


def ancestors():
    seen = np.eye(T, dtype=bool)
    for i in range(1, T):
        seen[i] |= seen[PARENT[i]]
    return seen


TREE = ancestors()


def random_inputs(batch=2, t=96, heads=2, kv_heads=2, d=16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((batch, t, heads, d), (batch, t, kv_heads, d), (batch, t, kv_heads, d), (batch, t, heads, d))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def assert_as_oracle(mask, attend=None, batch=2, heads=2, kv_heads=2, **options):
    """Output and gradients, with a random cotangent, as the dense oracle's."""
    q, k, v, d_out = random_inputs(batch, mask.q_len, heads, kv_heads)

    def both(attention):
        def everything(q, k, v):
            out, vjp = jax.vjp(lambda *x: attention(*x, mask, **options), q, k, v)
            return out, *vjp(d_out)

        return jax.jit(everything)(q, k, v)

    for got, wanted in zip(both(attend or xsake.attention), both(oracle.attention), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)


def natten(q, k, width=12, kernel=5):
    """Neighbourhood attention in a grid of `width` columns: a window that stays inside the picture."""
    height = T // width

    def near(q, k, size):
        centre = np.clip(q, kernel // 2, size - 1 - kernel // 2)
        return abs(centre - k) <= kernel // 2

    return near(q // width, k // width, height) & near(q % width, k % width, width)


MASK_MODS = {
    "vanilla": lambda q, k: (q >= 0) & (k >= 0),
    "causal": lambda q, k: k <= q,
    "sliding window": lambda q, k: (k <= q) & (q - k <= 20),
    "prefix LM": lambda q, k: (k < 25) | (k <= q),
    "document": lambda q, k: (DOCUMENT[q] == DOCUMENT[k]) & (k <= q),
    "document, not causal": lambda q, k: DOCUMENT[q] == DOCUMENT[k],
    "NATTEN": natten,
    "dilated sliding window": lambda q, k: (abs(q - k) <= 20) & ((q - k) % 4 == 0),
    "tree": lambda q, k: TREE[q, k],
    "shared prefix": lambda q, k: (k < 16) & (q >= 0) | (((q - 16) // 20 == (k - 16) // 20) & (k <= q) & (q >= 16)),
    "global tokens and window": lambda q, k: (abs(q - k) <= 8) | (k < 3) | (q < 3),
    "stand-alone self": lambda q, k: q == k,
}


@pytest.mark.parametrize(("batch", "heads"), [(None, None), (None, 3), (2, None), (2, 3)])
def test_a_mask_mod_as_it_is(batch, heads):
    """FlexAttention's signature, with `batch` and `heads` as its B and H: None is 1."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((q_idx - kv_idx) % (1 + b + h) == 0)

    mask = xsake.patterns.from_function(T, T, mask_mod, batch=batch, heads=heads, block_q=32, block_kv=16)
    where = np.ogrid[: batch or 1, : heads or 1, :T, :T]
    np.testing.assert_array_equal(mask.to_elements(), mask_mod(*where))
    of_heads = partial(mask_mod, 0)
    same = xsake.patterns.from_function(T, T, of_heads, of="tokens", heads=heads or 1, block_q=32, block_kv=16)
    np.testing.assert_array_equal(mask.to_elements()[0], same.to_elements()[0])


def test_a_function_without_a_signature():
    blocks = xsake.patterns.from_function(64, 64, np.greater_equal, block_q=16, block_kv=16)
    assert blocks.to_blocks()[0, 0].sum() == 10


SCORE_MODS = ["none", "ALiBi", "soft cap", "head and distance"]


@pytest.mark.parametrize("score_mod", sweep(SCORE_MODS, slow=SCORE_MODS[1:]))
def test_mask_mods_of_attention_gym(score_mod):
    """Every mod is a head of one mask; forward and gradients, alone and with what score_mods add."""
    q, k = np.arange(T)[:, None], np.arange(T)[None]
    mods = np.stack([np.broadcast_to(mod(q, k), (T, T)) for mod in MASK_MODS.values()])
    mask = xsake.patterns.from_function(
        T, T, lambda h, q, k: mods[h, q, k], of="tokens", heads=len(mods), block_q=32, block_kv=16
    )
    assert (mask.to_elements()[0] == mods).all()
    alone = [
        xsake.patterns.from_function(T, T, mod, of="tokens", block_q=32, block_kv=32) for mod in MASK_MODS.values()
    ]
    assert (np.stack([one.to_elements()[0, 0] for one in alone]) == mods).all()
    distance = np.abs(q - k)
    options = {
        "none": {},
        "ALiBi": dict(bias=-(2.0 ** -np.arange(1, 13))[:, None, None] * distance),
        "soft cap": dict(logits_soft_cap=1.5),
        "head and distance": dict(bias=np.random.default_rng(0).normal(size=(12, T))[:, distance]),
    }[score_mod]
    if "bias" in options:
        options = {"bias": jnp.asarray(options["bias"], jnp.float32)[None]}
    assert_as_oracle(mask, batch=1, heads=12, kv_heads=4, **options)
