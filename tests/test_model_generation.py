"""Generation: the tokens that the model itself would choose, however they are computed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TINY, TOKENS, build, run

import xsake
from xsake.model import Sampler, generate, stream
from xsake.model.generation import generation, prefill, writer

# One worker for the tests of the model: it has its programs.
pytestmark = pytest.mark.xdist_group("model")

PROMPTS = [TOKENS[0, :9].tolist(), TOKENS[1, :17].tolist()]
NEW = 4


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def greedy(model):
    return generate(model, PROMPTS, max_new_tokens=NEW)


def test_greedy_tokens_are_the_likeliest_without_a_cache(model, greedy):
    for prompt, new in zip(PROMPTS, greedy, strict=True):
        whole = np.zeros((1, 17 + NEW), np.int32)
        whole[0, : len(prompt) + NEW] = prompt + new
        likeliest = run(model, whole)[0].argmax(-1)
        assert likeliest[len(prompt) - 1 : len(prompt) + NEW - 1].tolist() == new


def test_a_prompt_alone_or_among_others_is_continued_alike(model, greedy):
    assert [generate(model, [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS] == greedy


def test_sparse_prefill_of_every_block_changes_nothing(model, greedy):
    def everything(layer, query, key):
        return xsake.patterns.causal(query.shape[1], key.shape[1], block_q=8, block_kv=8)

    assert generate(model, PROMPTS, max_new_tokens=NEW, mask_fn=everything) == greedy


def test_a_window_reads_no_more_of_the_cache_than_it_sees():
    """In the third chunk, and in a cache of many windows: the states are those of the tokens without a cache."""
    model = build(config=dataclasses.replace(TINY, layers=1, window=20))
    sequence = np.random.default_rng(0).integers(TINY.vocab_size, size=(2, 200)).astype(np.int32)
    expected = run(model, sequence)
    prompts = [row[:length].tolist() for row, length in zip(sequence, (150, 197), strict=True)]
    read = prefill.read_prompts(model, prompts, capacity=256, chunk=64)
    last = model.logits(model.norm(read.last))[:, 0]
    np.testing.assert_allclose(last, [expected[0, 149], expected[1, 196]], atol=1e-4)
    seen, _, places = read.cache.window(0, 1, 20)
    assert seen.shape[1] == 64 and places[:, 0].tolist() == [131, 178]
    following = np.stack([sequence[0, 150:153], sequence[1, 197:200]])
    logits, _ = run(model, following, cache=read.cache)
    np.testing.assert_allclose(logits, [expected[0, 150:153], expected[1, 197:200]], atol=1e-4)


@pytest.mark.slow  # test_model_transformer has masks of layers
def test_masks_are_those_of_the_prompt_and_may_be_trees(model, greedy):
    """A callable pytree is an argument of the compiled function: changed arrays in it compile nothing."""

    @jax.tree_util.register_pytree_node_class
    class Window:
        def __init__(self, blocks):
            self.blocks = blocks

        def __call__(self, layer, query, key):
            assert query.shape[1] == key.shape[1] == 17
            return xsake.BlockMask.from_blocks(
                self.blocks, block_q=1, block_kv=1, q_len=17, kv_len=17, is_causal=True, transpose=False
            )

        def tree_flatten(self):
            return (self.blocks,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    near = jnp.asarray(np.tri(17, 17, 0, dtype=bool) & ~np.tri(17, 17, -2, dtype=bool))
    assert generate(model, PROMPTS, max_new_tokens=NEW, mask_fn=Window(near | True)) == greedy
    compiled = generation._prefill._cache_size()
    assert generate(model, PROMPTS, max_new_tokens=NEW, mask_fn=Window(near)) != greedy
    assert generation._prefill._cache_size() == compiled


def test_other_lengths_do_not_compile_anew(model, greedy):
    compiled = prefill._read_block._cache_size(), writer._decode._cache_size()
    generate(model, [PROMPTS[0][:5], PROMPTS[1][:12]], max_new_tokens=NEW + 3)
    assert (prefill._read_block._cache_size(), writer._decode._cache_size()) == compiled


def test_a_stop_token_ends_its_sequence_only(model, greedy):
    stop = greedy[0][1]
    assert stop not in greedy[1]
    assert generate(model, PROMPTS, max_new_tokens=NEW, stop={stop}) == [greedy[0][:1], greedy[1]]


def test_steps_arrive_one_by_one(model, greedy):
    steps = stream(model, PROMPTS, max_new_tokens=NEW)
    assert next(steps).tolist() == [new[0] for new in greedy]
    assert np.stack(list(steps), 1).tolist() == [new[1:] for new in greedy]


def test_the_device_works_while_a_token_is_handed_out(model, monkeypatch):
    queued, step = [], writer.Writer.next

    def count(self, tokens, key):
        queued.append(tokens)
        return step(self, tokens, key)

    monkeypatch.setattr(writer.Writer, "next", count)
    seen = [len(queued) for _ in stream(model, PROMPTS, max_new_tokens=NEW)]
    assert seen == [0, 2, 3, 3]  # the first token waits for no other program, and nothing is computed in vain


@pytest.fixture(scope="module")
def small():
    return build(config=dataclasses.replace(TINY, layers=1, context=30))


ENDING = dict(prompts=[TOKENS[0, :25].tolist()], max_new_tokens=5, sampler=Sampler(temperature=1.0))


def test_the_context_can_be_used_to_its_end(small):
    assert len(generate(small, **ENDING)[0]) == 5


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts must not be empty"),
        ([[1], []], {}, "prompts must not be empty"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        ([[1] * 500], dict(max_new_tokens=13), "500 tokens and max_new_tokens=13 exceed the model's context of 512"),
        ([[1, 512]], {}, "tokens from 0 to 511, the model's vocabulary"),
        ([[-1]], {}, "tokens from 0 to 511"),
    ],
)
def test_wrong_calls_are_refused_at_once(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        stream(model, prompts, **dict(max_new_tokens=1) | options)


LOGITS = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))


def drawn(count=400, **options):
    keys = jax.random.split(jax.random.key(0), count)
    tokens = jax.vmap(lambda key: Sampler(**options)(LOGITS, key)[0])(keys)
    return np.bincount(tokens, minlength=4) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 0, 0]),
        (dict(temperature=1.0), [0.05, 0.5, 0.15, 0.3]),
        (dict(temperature=0.5), [0.0068, 0.6849, 0.0616, 0.2466]),  # probabilities squared
        (dict(temperature=1.0, top_k=2), [0, 0.625, 0, 0.375]),
        (dict(temperature=1.0, top_k=9), [0.05, 0.5, 0.15, 0.3]),
        (dict(temperature=1.0, top_p=0.4), [0, 1, 0, 0]),
        (dict(temperature=1.0, top_p=0.6), [0, 0.625, 0, 0.375]),
        (dict(temperature=1.0, top_k=3, top_p=0.82), [0, 0.625, 0, 0.375]),
        (dict(temperature=1.0, top_p=1.0), [0.05, 0.5, 0.15, 0.3]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(options, expected):
    found = drawn(**options)
    np.testing.assert_allclose(found, expected, atol=0.08)  # three standard deviations of 400 draws
    assert not found[np.array(expected) == 0].any()


def test_the_seed_decides_the_draw(small):
    once, again, other = (generate(small, seed=seed, **ENDING) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature=-1.0 must be a finite number, at least 0"),
        (dict(temperature=float("inf")), "temperature=inf must be a finite number"),
        (dict(top_k=0), "top_k=0 must be None, or an int of at least 1"),
        (dict(top_p=0.0), "top_p=0.0 must be None, or a finite number, above 0 and at most 1"),
        (dict(top_p=1.5), "top_p=1.5 must be None, or a finite number, above 0"),
    ],
)
def test_wrong_samplers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**options)
