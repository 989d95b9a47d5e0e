"""`xsake.compat.flex`: score_mods and mask_mods beside their dense evaluation, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import normal
from sweep import sweep

from xsake.compat.flex import and_masks, create_block_mask, flex_attention, or_masks
from xsake.compat.score_rule import Recognised, at_places

B, H, K, T, D = 2, 4, 2, 40, 16
SIZES = (B, H, T, T)
TABLE = normal(0, (H, 2 * T))
SLOPES = jnp.asarray(2.0 ** -np.arange(1, H + 1, dtype=np.float32))
DOCUMENTS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (B, T), np.int32), -1))
PREFIX = jnp.array([3, 11])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx).astype(jnp.float32)


def relative(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx - kv_idx + T]


SCORES = {
    "nothing": lambda score, b, h, q_idx, kv_idx: score,
    "a soft cap": lambda score, b, h, q_idx, kv_idx: 20 * jnp.tanh(score / 20),
    "tanh with other numbers": lambda score, b, h, q_idx, kv_idx: -3 * jnp.tanh(score * -0.7),
    "ALiBi": alibi,
    "a table": relative,
    "a bias of keys": lambda score, b, h, q_idx, kv_idx: 2 * score - TABLE[0, kv_idx] - score,
    "a bias and a cap": lambda score, *at: 5 * jnp.tanh(relative(2 * score, *at) / 5),
    "a rule": lambda score, b, h, q_idx, kv_idx: jnp.where(q_idx >= kv_idx, score, -jnp.inf),
    "a window after a cap": lambda score, b, h, q_idx, kv_idx: jnp.where(
        (kv_idx > q_idx) | (q_idx - kv_idx > 9), -float("inf"), 2 * jnp.tanh(score / 2)
    ),
    "a bias in documents": lambda score, b, h, q_idx, kv_idx: jnp.where(
        DOCUMENTS[b, q_idx] == DOCUMENTS[b][kv_idx], score + 1, score
    ),
    "-inf as a bias": lambda score, b, h, q_idx, kv_idx: score + jnp.where(q_idx > kv_idx + 3, 0, -jnp.inf),
    "-inf in a cap, which is no mask": lambda score, b, h, q_idx, kv_idx: (
        4 * jnp.tanh((score + jnp.where(q_idx > kv_idx, 0, -jnp.inf)) / 4)
    ),
}
MASKS = {
    "causal": causal,
    "a window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 9),
    "both sides": lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 7,
    "documents": and_masks(causal, lambda b, h, q_idx, kv_idx: DOCUMENTS[b, q_idx] == DOCUMENTS[b][kv_idx]),
    "a prefix": or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < PREFIX[b]),
    "heads": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 8 * (h + 1)),
    "no rule": lambda b, h, q_idx, kv_idx: q_idx * kv_idx % 7 == 3,
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < 0,
}
RULES = {"causal": (True, None), "a window": (True, (9, None)), "both sides": (False, (6, 6))}
REFUSED = {
    "itself": (lambda score, b, h, q_idx, kv_idx: score * score, "multiplies the score by itself"),
    "a temperature": (lambda score, b, h, q_idx, kv_idx: score * SLOPES[h], "by something of h: .* scale the query"),
    "after the cap": (lambda score, *at: alibi(jnp.tanh(score), *at), "adds to the score after tanh"),
    "two caps": (lambda score, *at: jnp.tanh(jnp.tanh(score)), "tanh twice"),
    "another function": (lambda score, *at: jnp.maximum(score, 0), "applies max to the score"),
    "a finite mask": (lambda score, b, h, q, kv: jnp.where(q >= kv, score, -1e9), "puts -1000000000.0 in the place"),
    "by the score": (lambda score, *at: jnp.where(score > 0, score, -jnp.inf), "applies gt to the score"),
    "no score": (lambda score, b, h, q_idx, kv_idx: SLOPES[h], "does not depend on the score"),
    "rounded": (lambda score, *at: score.astype(jnp.bfloat16), "rounds the score to bfloat16"),
    "capped in places": (lambda score, b, h, *at: jnp.where(h < 2, jnp.tanh(score), score), "in some places only"),
    "deleted, then capped": (lambda score, b, h, q, kv: jnp.tanh(jnp.where(q > kv, score, -jnp.inf)), "become -1"),
    "other gradients": (lambda score, *at: jax.lax.stop_gradient(score), "applies stop_gradient"),
}


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def arrays():
    shapes = (H, K, K)
    return [normal(2 + i, (B, n, T, D)) for i, n in enumerate(shapes)]


def places():
    return [jnp.arange(size) for size in SIZES]


def modified(scores, score_mod):
    return at_places(lambda *at: score_mod(scores[at], *at), *places())


def dense(q, k, v, score_mod, mask_mod):
    """float32[B, H, T, D] and its logsumexp, from all scores."""
    k, v = (jnp.repeat(x, H // K, 1) for x in (k, v))
    scores = modified(jnp.einsum("bhtd,bhsd->bhts", q, k, precision="highest") * D**-0.5, score_mod)
    scores = jnp.where(at_places(mask_mod, *places()) & ~jnp.isneginf(scores), scores, -jnp.inf)  # no gradient at -inf
    lse = jax.nn.logsumexp(scores, -1)
    some = jnp.isfinite(lse)
    weights = jnp.exp(scores - jnp.where(some, lse, 0)[..., None])
    return jnp.einsum("bhts,bhsd->bhtd", weights, v, precision="highest"), lse


# The score_mod of `test_values_and_gradients` goes through the steps of the others.
@pytest.mark.parametrize("name", sweep(SCORES, slow=[name for name in SCORES if name not in ("nothing", "a table")]))
def test_a_score_mod_is_recognised(name):
    @jax.jit
    def both(scores):
        found = Recognised.of(SCORES[name], SIZES)
        got = at_places(lambda *at: found.rule_at(*at).apply(scores[at]), *places())
        return got, modified(scores, SCORES[name])

    np.testing.assert_allclose(*both(3 * normal(5, SIZES)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_score_mod_that_is_no_argument_is_refused_by_its_step(name):
    score_mod, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"score_mod .*{message}.*Expressible: "):
        Recognised.of(score_mod, SIZES)


@pytest.mark.parametrize("name", sweep(MASKS, slow=["both sides", "a prefix", "nothing"]))
def test_a_mask_mod_is_exact(name):
    mask = create_block_mask(MASKS[name], B, H, T, T, BLOCK_SIZE=(16, 8))
    wanted = np.broadcast_to(jax.jit(lambda: at_places(MASKS[name], *places()))(), SIZES)
    np.testing.assert_array_equal(np.broadcast_to(mask.to_elements(), SIZES), wanted)
    if name in RULES:
        assert (mask.is_causal, mask.local_window_size, mask.bitmaps) == (*RULES[name], None)
    assert (mask.batch, mask.heads) == (2 if name in ("documents", "a prefix") else 1, 4 if name == "heads" else 1)


ALL = {name: (score_mod, causal) for name, score_mod in SCORES.items()}
ALL |= {f"mask: {name}": (alibi, mask_mod) for name, mask_mod in MASKS.items()}


@pytest.mark.parametrize("name", sweep(ALL, slow=list(ALL)))
def test_every_mod(name):
    """Outputs, and gradients for random cotangents of both."""
    _check(*ALL[name], TABLE)


def _check(score_mod, mask_mod, table):
    cotangent = normal(4, (B, H, T, D)), normal(5, (B, H, T))

    def both(attend):
        def loss(*given):
            out, lse = attend(*given)
            return (out * cotangent[0]).sum() + jnp.where(jnp.isfinite(lse), lse * cotangent[1], 0).sum(), (out, lse)

        return jax.value_and_grad(loss, range(4), has_aux=True)(*arrays(), table)

    def of_table(table):
        return score_mod(table) if score_mod is learned else score_mod

    def ours(q, k, v, table):
        mask = create_block_mask(mask_mod, B, H, T, T, BLOCK_SIZE=16)
        return flex_attention(q, k, v, of_table(table), mask, enable_gqa=True, return_lse=True)

    got = jax.jit(lambda: both(ours))()
    wanted = jax.jit(lambda: both(lambda q, k, v, table: dense(q, k, v, of_table(table), mask_mod)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)


def learned(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        capped = 5 * jnp.tanh((2 * score + table[h, q_idx - kv_idx + T]) / 5)
        return jnp.where((q_idx > kv_idx) | (kv_idx == 1), capped, -jnp.inf)

    return score_mod


def test_values_and_gradients():
    """Under jit: factor, table with a gradient, cap, rule and documents in one call, with rows that attend nothing."""
    _check(learned, MASKS["documents"], TABLE)


def test_under_jit():
    """What no traced array enters is known; a mask of traced documents is exact."""

    @jax.jit
    def masks(documents):
        known = create_block_mask(causal, None, None, T, T)
        assert not known.traced and known.is_causal
        of = and_masks(causal, lambda b, h, q_idx, kv_idx: documents[b, q_idx] == documents[b, kv_idx])
        return create_block_mask(of, B, None, T, T, BLOCK_SIZE=16)

    wanted = create_block_mask(MASKS["documents"], B, None, T, T, BLOCK_SIZE=16)
    np.testing.assert_array_equal(masks(DOCUMENTS).to_elements(), wanted.to_elements())


def test_wrong_calls(unchecked_annotations):
    q, k, v = arrays()
    with pytest.raises(ValueError, match="4 heads and key has 2: give enable_gqa=True"):
        flex_attention(q, k, v)
    with pytest.raises(
        ValueError, match=r"query must be an array \[batch, heads, tokens, dim\]; got .* of \(4, 40, 16\)"
    ):
        flex_attention(q[0], k, v)
    with pytest.raises(TypeError, match=r"score_mod must not branch in Python.*use jnp\.where"):
        flex_attention(q, k, v, lambda score, b, h, q, kv: score if q > kv else -score, enable_gqa=True)
    with pytest.raises(TypeError, match=r"score_mod must be written in jax\.numpy"):
        flex_attention(q, k, v, lambda score, b, h, q, kv: score + np.ones(4)[h], enable_gqa=True)
    with pytest.raises(TypeError, match=r"score_mod must return one scalar .* it returns float32\[4\]"):
        flex_attention(q, k, v, lambda score, b, h, q, kv: score + SLOPES, enable_gqa=True)
    with pytest.raises(NotImplementedError, match="divides the score by a traced array"):
        jax.jit(lambda cap: flex_attention(q, q, q, lambda score, *at: cap * jnp.tanh(score / cap)))(5.0)
    with pytest.raises(TypeError, match="mask_mod must return a boolean"):
        create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx, None, None, T, T)
    with pytest.raises(ValueError, match="H=0 must be an int of at least 1, or None"):
        create_block_mask(causal, None, 0, T, T)
    with pytest.raises(ValueError, match="BLOCK_SIZE"):
        create_block_mask(causal, None, None, T, T, BLOCK_SIZE=(1, 2, 3))
    with pytest.raises(ValueError, match="mask is for 8 queries x 8 keys"):
        flex_attention(q, q, q, block_mask=create_block_mask(causal, None, None, 8, 8))
