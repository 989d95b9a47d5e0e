"""Fixed block patterns, each a BlockMask.

A pattern that is one rule (`dense`, `sliding_window`) is exact to the token. A pattern that is an OR of rules (sink +
window, Longformer, BigBird, ...) chooses whole blocks and carries the causal rule only: a window rule would delete the
sink.
Sizes are in tokens unless the name says blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask


class _Blocks:
    """Block numbers of a grid, to write patterns as boolean expressions of `i` (query block) and `j` (KV block)."""

    def __init__(self, q_len: int, kv_len: int, block_q: int, block_kv: int, is_causal: bool):
        self.size: dict[str, Any] = dict(
            q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv, is_causal=is_causal
        )
        # `full` validates the sizes; what it lists is what the rule allows.
        self.allowed = np.asarray(BlockMask.full(**self.size, transpose=False).to_blocks())[0, 0]
        num_q, num_kv = self.allowed.shape
        self.i, self.j = np.arange(num_q)[:, None], np.arange(num_kv)[None, :]
        self.block_q, self.block_kv, self.q_len, self.kv_len = block_q, block_kv, q_len, kv_len
        self.is_causal = is_causal

    def mask(self, blocks: np.ndarray, capacity: int | None) -> BlockMask:
        blocks = np.broadcast_to(blocks, (*blocks.shape[:-2], *self.allowed.shape))
        return BlockMask.from_blocks(blocks, **self.size, capacity=capacity)

    def window(self, size: int) -> np.ndarray:
        """Blocks that hold some pair of tokens at most `size` apart (on the past side only, if causal)."""
        _at_least("window", size, 0)
        q_last = np.minimum((self.i + 1) * self.block_q, self.q_len) - 1
        kv_last = np.minimum((self.j + 1) * self.block_kv, self.kv_len) - 1
        low, high = self.j * self.block_kv - q_last, kv_last - self.i * self.block_q
        return Band(size, 0 if self.is_causal else size).touches(low, high)

    def diagonal(self) -> np.ndarray:
        return self.window(0)

    def first_keys(self, tokens: int) -> np.ndarray:
        return self.j * self.block_kv < tokens

    def first_queries(self, tokens: int) -> np.ndarray:
        return self.i * self.block_q < tokens


def dense(q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128, is_causal: bool = False) -> BlockMask:
    """Every block (below the diagonal, if causal).

    >>> dense(256, 256, is_causal=True).to_blocks()[0, 0].tolist()
    [[True, False], [True, True]]
    """
    return BlockMask.full(q_len, kv_len, block_q=block_q, block_kv=block_kv, is_causal=is_causal)


def causal(q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128) -> BlockMask:
    """`dense` with the causal rule."""
    return dense(q_len, kv_len, block_q=block_q, block_kv=block_kv, is_causal=True)


def sliding_window(
    q_len: int,
    kv_len: int,
    *,
    window: int | tuple[int | None, int | None],
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = False,
) -> BlockMask:
    """Tokens at most `window` apart: an int is both sides, a tuple (left, right); inclusive and exact to the token."""
    return BlockMask.full(
        q_len, kv_len, block_q=block_q, block_kv=block_kv, is_causal=is_causal, local_window_size=window
    )


def sink_window(
    q_len: int,
    kv_len: int,
    *,
    sink: int,
    window: int,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """StreamingLLM: the blocks of the first `sink` keys and of the last `window` ones."""
    _at_least("sink", sink, 0)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    return g.mask(g.first_keys(sink) | g.window(window), capacity)


def longformer(
    q_len: int,
    kv_len: int,
    *,
    window: int,
    num_global: int,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """Longformer: a window, and the first `num_global` tokens that see all and are seen by all."""
    _at_least("num_global", num_global, 0)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    return g.mask(g.window(window) | g.first_keys(num_global) | g.first_queries(num_global), capacity)


def big_bird(
    q_len: int,
    kv_len: int,
    *,
    window: int,
    num_global: int,
    num_random_blocks: int,
    seed: int,
    heads: int = 1,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """BigBird: Longformer's blocks and `num_random_blocks` more in each row, drawn anew for each head."""
    _at_least("num_global", num_global, 0)
    _at_least("num_random_blocks", num_random_blocks, 0)
    _at_least("heads", heads, 1)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    fixed = g.window(window) | g.first_keys(num_global) | g.first_queries(num_global)
    free = g.allowed & ~fixed
    chosen = _smallest(np.random.default_rng(seed).random((heads, *free.shape)), free, num_random_blocks)
    return g.mask(fixed | chosen, capacity)


def strided(
    q_len: int,
    kv_len: int,
    *,
    stride: int,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """Sparse Transformer: the last `stride` tokens, and one block column in every `stride` tokens before them."""
    _at_least("stride", stride, block_kv)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    step = -(-stride // block_kv)
    return g.mask(g.window(stride) | (g.j % step == step - 1), capacity)


def dilated(
    q_len: int,
    kv_len: int,
    *,
    window: int,
    dilation: int,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """Dilated window: within `window * dilation` tokens, every `dilation`-th block by distance, and the diagonal."""
    _at_least("dilation", dilation, 1)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    distance = np.abs(g.i * block_q // block_kv - g.j)
    return g.mask((g.window(window * dilation) & (distance % dilation == 0)) | g.diagonal(), capacity)


def random(
    q_len: int,
    kv_len: int,
    *,
    density: float,
    seed: int,
    heads: int = 1,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = False,
    capacity: int | None = None,
) -> BlockMask:
    """Exactly `density` of the allowed blocks per head, to the nearest block; blocks on the diagonal come first."""
    if not 0 <= density <= 1:
        raise ValueError(f"{density=} must be between 0 and 1")
    _at_least("heads", heads, 1)
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    wanted = round(density * int(g.allowed.sum()))
    score = np.random.default_rng(seed).random((heads, *g.allowed.shape)) - np.broadcast_to(
        g.diagonal(), g.allowed.shape
    )
    flat = _smallest(score.reshape(heads, -1), g.allowed.reshape(-1), wanted)
    return g.mask(flat.reshape(score.shape), capacity)


def from_function(
    q_len: int,
    kv_len: int,
    function: Callable,
    *,
    of: Literal["blocks", "tokens"] = "blocks",
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = False,
    capacity: int | None = None,
) -> BlockMask:
    """A mask from your own function, evaluated once, here, on numpy index arrays that broadcast.

    `of="blocks"`: `function(i, j)` of block numbers. `of="tokens"`: `function(q, k)` of token numbers. It must be
    constant in each block; with `is_causal` it must allow no later key (`k <= q`) and be constant in each block's
    elements that the causal rule leaves. Otherwise ValueError. Both may return [..., heads, rows, columns].

    >>> from_function(256, 256, lambda i, j: i == j).to_blocks()[0, 0].tolist()
    [[True, False], [False, True]]
    """
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    if of == "blocks":
        blocks = np.asarray(function(g.i, g.j))
        if blocks.dtype != np.bool_:
            raise TypeError(f"function must return booleans, got dtype {blocks.dtype}")
        return g.mask(np.atleast_2d(blocks), capacity)
    if of != "tokens":
        raise ValueError(f'of={of!r} must be "blocks" or "tokens"')
    return g.mask(_blocks_of_tokens(g, function), capacity)


def _blocks_of_tokens(g: _Blocks, function: Callable) -> np.ndarray:
    """Evaluated a row of blocks at a time: no [q_len, kv_len] array."""
    band = Band.of(g.is_causal, None)
    k = np.arange(g.kv_len)[None, :]
    starts = np.arange(0, g.kv_len, g.block_kv)
    rows = []
    for i in range(g.allowed.shape[0]):
        q = np.arange(i * g.block_q, min((i + 1) * g.block_q, g.q_len))[:, None]
        value = np.asarray(function(q, k))
        if value.dtype != np.bool_:
            raise TypeError(f"function must return booleans, got dtype {value.dtype}")
        value = np.broadcast_to(np.atleast_2d(value), (*value.shape[:-2], q.shape[0], g.kv_len))
        visible = np.broadcast_to(band.allows(k - q), value.shape)
        if (deleted := value & ~visible).any():
            row, column = np.argwhere(deleted)[0][-2:]
            raise ValueError(
                f"the token function allows (query {q[row, 0]}, key {column}), which is_causal=True deletes: add "
                f"`& (k <= q)` to the function if it is to be causal, or leave out is_causal if it is not"
            )
        on = np.add.reduceat((value & visible).sum(-2), starts, -1)
        seen = np.add.reduceat(visible.sum(-2), starts, -1)
        mixed = (on > 0) & (on < seen)
        if mixed.any():
            raise ValueError(
                f"the token function is not constant in block (row {i}, column {int(np.argwhere(mixed)[0][-1])}): it "
                f"is true for some of its elements only. Use blocks smaller than {g.block_q} x {g.block_kv}, "
                f"segment_ids or a window."
            )
        rows.append(on > 0)
    return np.stack(rows, -2)


def _smallest(score: np.ndarray, eligible: np.ndarray, count: int) -> np.ndarray:
    """Along the last axis, the `count` eligible places with the smallest scores."""
    score = np.where(eligible, score, np.inf)
    order = np.argsort(score, axis=-1, kind="stable")
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, order[..., :count], True, -1)
    return chosen & eligible


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
