"""Every pattern against its definition, written here as loops over blocks and tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xsake import BlockMask, patterns

SIZES = [
    (100, 100, 16, 16),
    (75, 131, 16, 32),
    (131, 75, 32, 16),
    (64, 64, 16, 16),
    (1, 50, 16, 16),
    (33, 1, 16, 16),
    (63, 63, 64, 64),
]
CAUSAL = [True, False]


def each(size, is_causal, block, *, heads=1):
    """bool[heads, nQ, nK]: `block(h, rows, columns)` of each block that the causal rule allows."""
    t, s, bq, bk = size
    n, m = -(-t // bq), -(-s // bk)
    blocks = np.zeros((heads, n, m), bool)
    for h, i, j in np.ndindex(heads, n, m):
        rows, columns = range(i * bq, min((i + 1) * bq, t)), range(j * bk, min((j + 1) * bk, s))
        visible = not is_causal or columns[0] <= rows[-1]
        blocks[h, i, j] = visible and block(h, rows, columns)
    return blocks


def near(rows, columns, window, is_causal):
    """Some pair of tokens is at most `window` apart, in the past only if causal."""
    return any(0 <= q - k <= window if is_causal else abs(q - k) <= window for q in rows for k in columns)


def build(pattern, size, **options) -> BlockMask:
    t, s, bq, bk = size
    return pattern(t, s, block_q=bq, block_kv=bk, **options)


def assert_blocks(mask, expected, is_causal):
    np.testing.assert_array_equal(mask.to_blocks()[0], expected)
    assert mask.is_causal == is_causal
    assert mask.batch == 1 and mask.heads == expected.shape[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_causal", CAUSAL)
class TestBlocks:
    def test_dense(self, size, is_causal):
        mask = build(patterns.dense, size, is_causal=is_causal)
        assert_blocks(mask, each(size, is_causal, lambda h, q, k: True), is_causal)
        expected = np.tri(*size[:2], dtype=bool) if is_causal else np.ones(size[:2], bool)
        np.testing.assert_array_equal(mask.to_elements()[0, 0], expected)

    @pytest.mark.parametrize("window", [0, 5, 40, (21, 3), (None, 7), (30, None)])
    def test_sliding_window_is_exact_to_the_token(self, size, is_causal, window):
        mask = build(patterns.sliding_window, size, window=window, is_causal=is_causal)
        left, right = window if isinstance(window, tuple) else (window, window)
        expected = np.zeros(size[:2], bool)
        for q, k in np.ndindex(*size[:2]):
            expected[q, k] = (
                (left is None or q - k <= left) and (right is None or k - q <= right) and (k <= q or not is_causal)
            )
        np.testing.assert_array_equal(mask.to_elements()[0, 0], expected)

    @pytest.mark.parametrize("sink, window", [(0, 10), (1, 0), (17, 33), (40, 64)])
    def test_sink_window(self, size, is_causal, sink, window):
        mask = build(patterns.sink_window, size, sink=sink, window=window, is_causal=is_causal)
        expected = each(size, is_causal, lambda h, q, k: k[0] < sink or near(q, k, window, is_causal))
        assert_blocks(mask, expected, is_causal)
        assert mask.local_window_size is None, "a window rule would delete the sink"

    @pytest.mark.parametrize("window, num_global", [(10, 0), (0, 1), (33, 20)])
    def test_longformer(self, size, is_causal, window, num_global):
        mask = build(patterns.longformer, size, window=window, num_global=num_global, is_causal=is_causal)
        expected = each(
            size, is_causal, lambda h, q, k: k[0] < num_global or q[0] < num_global or near(q, k, window, is_causal)
        )
        assert_blocks(mask, expected, is_causal)

    def test_big_bird(self, size, is_causal):
        options = dict(window=20, num_global=10, is_causal=is_causal)
        fixed = build(patterns.longformer, size, **options).to_blocks()[0]
        allowed = each(size, is_causal, lambda h, q, k: True)
        for count in (0, 1, 2, 50):
            mask = build(patterns.big_bird, size, **options, num_random_blocks=count, seed=1, heads=3)
            blocks = mask.to_blocks()[0]
            assert blocks.shape[0] == 3 and (blocks & fixed == fixed).all() and not (blocks & ~allowed).any()
            more = (blocks & ~fixed).sum(-1)
            np.testing.assert_array_equal(
                more, np.broadcast_to(np.minimum(count, (allowed & ~fixed).sum(-1)), more.shape)
            )

    @pytest.mark.parametrize("stride", [32, 45, 64])
    def test_strided(self, size, is_causal, stride):
        """The last `stride` tokens, and of every `stride` tokens (in whole blocks of keys) the last block."""
        stride = max(stride, size[3])
        step = -(-stride // size[3])
        mask = build(patterns.strided, size, stride=stride, is_causal=is_causal)
        expected = each(
            size, is_causal, lambda h, q, k: (k[0] // size[3]) % step == step - 1 or near(q, k, stride, is_causal)
        )
        assert_blocks(mask, expected, is_causal)

    @pytest.mark.parametrize("window, dilation", [(20, 1), (20, 2), (15, 3), (0, 2)])
    def test_dilated(self, size, is_causal, window, dilation):
        mask = build(patterns.dilated, size, window=window, dilation=dilation, is_causal=is_causal)

        def block(h, q, k):
            distance = abs(q[0] // size[3] - k[0] // size[3])
            return near(q, k, 0, is_causal) or (near(q, k, window * dilation, is_causal) and distance % dilation == 0)

        assert_blocks(mask, each(size, is_causal, block), is_causal)

    @pytest.mark.parametrize("density", [0.0, 0.1, 0.37, 0.9, 1.0])
    def test_random_density_is_exact(self, size, is_causal, density):
        mask = build(patterns.random, size, density=density, seed=3, heads=4, is_causal=is_causal)
        allowed = each(size, is_causal, lambda h, q, k: True)[0]
        blocks = mask.to_blocks()[0]
        assert not (blocks & ~allowed).any()
        np.testing.assert_array_equal(blocks.sum((1, 2)), [round(density * allowed.sum())] * 4)
        np.testing.assert_allclose(mask.density(), density, atol=0.5 / allowed.sum() + 1e-6)


def test_causal_is_dense_with_the_rule():
    a, b = (
        patterns.causal(100, 100, block_q=16, block_kv=32),
        patterns.dense(100, 100, block_q=16, block_kv=32, is_causal=True),
    )
    np.testing.assert_array_equal(a.to_elements(), b.to_elements())


@pytest.mark.parametrize("is_causal", CAUSAL)
def test_random_takes_the_diagonal_first(is_causal):
    blocks = patterns.random(
        160, 160, density=0.3, seed=0, heads=2, block_q=16, block_kv=16, is_causal=is_causal
    ).to_blocks()[0]
    assert np.einsum("hii->hi", blocks).all(), "no row is empty"


def test_seeds():
    def drawn(seed, heads=2):
        return patterns.random(320, 320, density=0.3, seed=seed, heads=heads, block_q=16, block_kv=16).to_blocks()[0]

    np.testing.assert_array_equal(drawn(0), drawn(0))
    assert (drawn(0) != drawn(1)).any() and (drawn(0)[0] != drawn(0)[1]).any()

    def bird(seed):
        return patterns.big_bird(
            320, 320, window=16, num_global=16, num_random_blocks=2, seed=seed, heads=2, block_q=16, block_kv=16
        ).to_blocks()[0]

    np.testing.assert_array_equal(bird(0), bird(0))
    assert (bird(0) != bird(1)).any() and (bird(0)[0] != bird(0)[1]).any()


def test_capacity_is_passed_on():
    sizes = dict(block_q=16, block_kv=16, capacity=40)
    masks = [
        patterns.sink_window(96, 96, sink=16, window=16, **sizes),
        patterns.longformer(96, 96, num_global=16, window=16, **sizes),
        patterns.big_bird(96, 96, num_global=16, window=16, num_random_blocks=1, seed=0, **sizes),
        patterns.strided(96, 96, stride=32, **sizes),
        patterns.dilated(96, 96, window=16, dilation=2, **sizes),
        patterns.random(96, 96, density=0.5, seed=0, **sizes),
        patterns.from_function(96, 96, lambda i, j: i == j, **sizes),
    ]
    assert [mask.capacity for mask in masks] == [40] * len(masks)


def test_every_pattern_is_tested_here():
    """In this file, or in a file beside it whose name begins with the same words."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_pattern*.py"))
    public = {
        n
        for n in dir(patterns)
        if not n.startswith("_") and getattr(getattr(patterns, n), "__module__", "") == "xsake.hads.mask.patterns"
    }
    assert {"dense", "from_function"} <= public
    assert [name for name in public if f"patterns.{name}" not in tests] == []


# -- a user's function -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_causal", CAUSAL)
def test_function_of_blocks(size, is_causal):
    calls = []

    def function(i, j):
        calls.append(1)
        return (i + 2 * j) % 3 == 0

    mask = build(patterns.from_function, size, function=function, is_causal=is_causal)
    expected = each(size, is_causal, lambda h, q, k: (q[0] // size[2] + 2 * (k[0] // size[3])) % 3 == 0)
    assert_blocks(mask, expected, is_causal)
    assert len(calls) == 1, "evaluated once, at construction"


def test_function_of_blocks_for_each_head():
    def function(i, j):
        return np.stack([i == j, i >= j, (i + j) % 2 == 0])

    blocks = patterns.from_function(64, 64, function, block_q=16, block_kv=16).to_blocks()[0]
    i, j = np.indices((4, 4))
    np.testing.assert_array_equal(blocks, function(i, j))


@pytest.mark.parametrize("is_causal", CAUSAL)
def test_function_of_tokens(is_causal):
    """Documents that begin and end at block boundaries."""
    document = np.array([0] * 32 + [1] * 48 + [2] * 20)

    def function(q, k):
        return (document[q] == document[k]) & ((k <= q) | (not is_causal))

    mask = patterns.from_function(100, 100, function, of="tokens", block_q=16, block_kv=16, is_causal=is_causal)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], function(*np.indices((100, 100))))


def test_function_of_tokens_for_each_head():
    def function(q, k):
        return np.stack([q // 16 == k // 16, q // 32 == k // 32])

    mask = patterns.from_function(64, 64, function, of="tokens", block_q=16, block_kv=16)
    q, k = np.indices((64, 64))
    np.testing.assert_array_equal(mask.to_elements()[0], function(q, k))


def test_function_of_tokens_is_judged_after_the_causal_rule():
    """`k <= q` is not constant in a diagonal block, but the causal rule says the same there."""
    mask = patterns.from_function(70, 70, lambda q, k: k <= q, of="tokens", block_q=16, block_kv=16, is_causal=True)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], np.tri(70, dtype=bool))
    assert mask.bitmaps is None


@pytest.mark.parametrize("prefix, element", [(5, "query 0, key 1"), (48, "query 0, key 1")])
def test_function_of_tokens_that_the_causal_rule_would_cut(prefix, element):
    """A prefix-LM: the causal rule would leave nothing of the prefix, within one block or over several."""

    def prefix_lm(q, k):
        return (k <= q) | (k < prefix)

    with pytest.raises(ValueError, match=rf"function allows \({element}\), which is_causal=True deletes.*k <= q"):
        patterns.from_function(70, 70, prefix_lm, of="tokens", block_q=16, block_kv=16, is_causal=True)


@pytest.mark.parametrize("at", [(0, 0), (40, 3), (69, 69), (64, 20)])
def test_function_of_tokens_that_is_not_constant_in_a_block_gives_a_bitmap(at):
    def function(q, k):
        return (q == at[0]) & (k == at[1])

    mask = patterns.from_function(70, 70, function, of="tokens", block_q=16, block_kv=16)
    assert np.argwhere(mask.to_blocks()[0, 0]).tolist() == [[at[0] // 16, at[1] // 16]]
    assert np.argwhere(mask.to_elements()[0, 0]).tolist() == [list(at)]
    assert mask.bitmaps is not None


# -- wrong calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: patterns.random(64, 64, density=1.5, seed=0), ValueError, "density=1.5 must be between 0 and 1"),
        (lambda: patterns.random(64, 64, density=0.5, seed=0, heads=0), ValueError, "heads=0 must be at least 1"),
        (lambda: patterns.sink_window(64, 64, sink=-1, window=3), ValueError, "sink=-1 must be at least 0"),
        (lambda: patterns.sink_window(64, 64, sink=1, window=-3), ValueError, "window=-3 must be at least 0"),
        (lambda: patterns.sliding_window(64, 64, window=-3), ValueError, "-3.*must not be negative"),
        (lambda: patterns.longformer(64, 64, window=1, num_global=-1), ValueError, "num_global=-1"),
        (
            lambda: patterns.big_bird(64, 64, window=1, num_global=1, num_random_blocks=-1, seed=0),
            ValueError,
            "num_random_blocks=-1",
        ),
        (lambda: patterns.strided(64, 64, stride=8, block_kv=16), ValueError, "stride=8 must be at least 16"),
        (lambda: patterns.dilated(64, 64, window=8, dilation=0), ValueError, "dilation=0 must be at least 1"),
        (lambda: patterns.dense(0, 64), ValueError, "q_len=0 must be at least 1"),
        (lambda: patterns.dense(64, 64, block_kv=0), ValueError, "block_kv=0 must be at least 1"),
        (
            lambda: patterns.from_function(64, 64, lambda i, j: i * j),
            TypeError,
            "function must return booleans, got dtype int",
        ),
        (
            lambda: patterns.from_function(64, 64, lambda i, j: i * j, of="tokens"),
            TypeError,
            "function must return booleans, got dtype int",
        ),
        (
            lambda: patterns.from_function(64, 64, lambda h, q, kv: q == kv, of="tokens"),
            TypeError,
            r"takes \(q, kv\), with heads= \(h, q, kv\), .* batch=None and heads=None, and it takes \(h, q, kv\)",
        ),
        (
            lambda: patterns.from_function(64, 64, lambda q, kv: q == kv, heads=2),
            TypeError,
            r"here are batch=None and heads=2, and it takes \(q, kv\)",
        ),
        (
            lambda: patterns.from_function(64, 64, lambda b, h, q, kv: q == kv, of="blocks"),
            TypeError,
            r"of blocks takes \(i, j\), and this one takes \(b, h, q, kv\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_patterns(call, error, message):
    with pytest.raises(error, match=message):
        call()
