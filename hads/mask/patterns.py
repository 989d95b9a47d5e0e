"""Fixed block patterns, each a BlockMask.

A pattern that is one rule (`dense`, `sliding_window`, `documents`, `prefix_lm`) is exact to the token. A pattern that
is an OR of rules (sink + window, Longformer, BigBird, ...) chooses whole blocks and carries the causal rule only: a
window rule would delete the sink.
Sizes are in tokens unless the name says blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.device import on_host
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.token_function import Known, mask_of_tokens


class _Blocks:
    """Block numbers of a grid, to write patterns as boolean expressions of `i` (query block) and `j` (KV block)."""

    def __init__(self, q_len: int, kv_len: int, block_q: int, block_kv: int, is_causal: bool):
        self.size: dict[str, Any] = dict(
            q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv, is_causal=is_causal
        )
        self.allowed, _ = Grid.of(block_q, block_kv, q_len, kv_len, is_causal, None).allowed_and_full()
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
    """StreamingLLM: the blocks of the first `sink` keys, and of the keys at a distance of at most `window` tokens.

    A query's own key is at distance 0: the last `window + 1` keys, and whatever else lies in their blocks.
    """
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


def documents(
    segment_ids: Array | np.ndarray | tuple[Array | np.ndarray, Array | np.ndarray],
    *,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = True,
    capacity: int | None = None,
) -> BlockMask:
    """Packed documents: tokens attend within their own document, and blocks without such a pair are skipped.

    `segment_ids` are i32[T], i32[B, T] or a (query, key) pair of them; a negative id is padding. Under jit, documents
    should be numbered in ascending order: others are right, too, but skip fewer blocks; and each of the `capacity`
    slots holds a bitmap.

    >>> import numpy as np
    >>> documents(np.repeat(np.arange(4), 64), block_q=64, block_kv=64).to_blocks()[0, 0].sum()
    np.int64(4)
    """
    pair: Any = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be one array or a (query, key) pair; got {len(pair)} entries")
    traced = any(isinstance(x, jax.core.Tracer) for x in pair)
    xp: Any = jnp if traced else np
    pair = tuple(jnp.asarray(x) if traced else on_host(x) for x in pair)
    for x in pair:
        if not np.issubdtype(x.dtype, np.integer):
            raise TypeError(f"segment_ids must be integers, got dtype {x.dtype}")
        if x.ndim not in (1, 2) or 0 in x.shape:
            raise ValueError(f"segment_ids must be [T] or [B, T]; got shape {tuple(x.shape)}")
    q_ids, k_ids = (x.reshape(-1, x.shape[-1]) for x in pair)
    batch = max(q_ids.shape[0], k_ids.shape[0])
    if q_ids.shape[0] not in (1, batch) or k_ids.shape[0] not in (1, batch):
        raise ValueError(f"segment_ids have batches {q_ids.shape[0]} and {k_ids.shape[0]}, which must be equal or 1")
    q_ids, k_ids = (xp.broadcast_to(x, (batch, x.shape[1])) for x in (q_ids, k_ids))
    grid = Grid.of(block_q, block_kv, q_ids.shape[1], k_ids.shape[1], is_causal, None)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        mine, theirs = q_ids[b, q], k_ids[b, k]
        return (mine == theirs) & (mine >= 0) & (h >= 0)

    (q_low, q_high), (k_low, k_high) = (_range(xp, q_ids, block_q), _range(xp, k_ids, block_kv))
    q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
    k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
    overlap = xp.maximum(q_low, k_low) <= xp.minimum(q_high, k_high)
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    padded = tuple(
        (xp.pad(x, ((0, 0), (0, -x.shape[1] % n)), constant_values=-1) < 0).reshape(batch, -1, n).any(-1)
        for x, n in ((q_ids, block_q), (k_ids, block_kv))
    )
    known = Known(overlap, one & ~padded[0][:, None, :, None] & ~padded[1][:, None, None, :])
    return BlockMask.of(mask_of_tokens(grid, same, batch=batch, heads=1, known=known, capacity=capacity))


def _range(xp: Any, ids: Any, block: int) -> tuple[Any, Any]:
    """(lowest, highest) id of each block of tokens, [B, blocks], padding left out: (2**31 - 1, -1) where all is."""
    most = np.int32(2**31 - 1)
    split = xp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), constant_values=-1).reshape(ids.shape[0], -1, block)
    return xp.where(split < 0, most, split).min(-1), xp.maximum(split, -1).max(-1)


def prefix_lm(
    q_len: int,
    kv_len: int,
    *,
    prefix: int | Array | np.ndarray,
    block_q: int = 128,
    block_kv: int = 128,
    capacity: int | None = None,
) -> BlockMask:
    """Causal attention, and all queries see the first `prefix` keys: an int, or i32[B], which may be traced.

    >>> prefix_lm(256, 256, prefix=100, block_q=64, block_kv=64).to_blocks()[0, 0].sum(-1).tolist()
    [2, 2, 3, 4]
    """
    traced = isinstance(prefix, jax.core.Tracer)
    length: Any = jnp.asarray(prefix) if traced else on_host(prefix)
    if not np.issubdtype(length.dtype, np.integer) or length.ndim > 1:
        raise TypeError(f"prefix must be an int or i32[B]; got {prefix!r}")
    if not traced and (length < 0).any():
        raise ValueError(f"prefix={prefix!r} must not be negative")
    length = length.reshape(-1)
    grid = Grid.of(block_q, block_kv, q_len, kv_len, False, None)

    def attends(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((k <= q) | (k < length[b])) & (h >= 0)

    q_first, k_first = np.arange(grid.num_q)[:, None] * block_q, np.arange(grid.num_kv)[None, :] * block_kv
    below = (k_first <= q_first + block_q - 1)[None, None], (k_first + block_kv - 1 <= q_first)[None, None]
    seen = length[:, None, None, None]
    known = Known(below[0] | (k_first[None, None] < seen), below[1] | ((k_first + block_kv)[None, None] <= seen))
    size = dict(batch=length.shape[0], heads=1)
    return BlockMask.of(mask_of_tokens(grid, attends, **size, known=known, capacity=capacity))


def from_function(
    q_len: int,
    kv_len: int,
    function: Callable,
    *,
    of: Literal["blocks", "tokens"] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = False,
    capacity: int | None = None,
) -> BlockMask:
    """A mask from your own function, evaluated once, here, on index arrays that broadcast.

    `of="blocks"`: `function(i, j)` of block numbers. `of="tokens"`: `function(q, kv)` of token numbers, any predicate:
    a block in which the function is true for some elements only gets a bitmap. With `is_causal`, the function must
    allow no later key (`kv <= q`), or ValueError. Both may return [..., heads, rows, columns].

    With `heads`, a function of tokens is called as `function(h, q, kv)`; with `batch` and `heads` as
    `function(b, h, q, kv)`. A function that takes these four, as FlexAttention's `mask_mod` does, needs no `of`, and
    None for `batch` or `heads` is 1. It may use traced arrays under jit: then every slot of the lists (`capacity`) has
    a bitmap, and the index arrays are traced, too.

    >>> from_function(256, 256, lambda i, j: i == j).to_blocks()[0, 0].tolist()
    [[True, False], [False, True]]
    >>> int(from_function(256, 256, lambda q, kv: (q - kv) % 3 == 0, of="tokens").to_elements().sum())
    21846
    >>> from_function(256, 256, lambda b, h, q, kv: (kv <= q) & (q - kv < 64 << h), heads=2).to_elements().shape
    (1, 2, 256, 256)
    """
    is_mask_mod = _takes(function, 4) and not _takes(function, 2)
    if of is None:
        of = "tokens" if is_mask_mod or batch is not None or heads is not None else "blocks"
    if of == "tokens":
        if is_mask_mod:
            batch, heads = (1 if size is None else size for size in (batch, heads))
        if not _takes(function, 2 + (batch is not None) + (heads is not None)):
            raise TypeError(
                f"a function of tokens takes (q, kv), with heads= (h, q, kv), with batch= and heads= (b, h, q, kv); "
                f"here are {batch=} and {heads=}, and it takes {inspect.signature(function)}"
            )
        grid = Grid.of(block_q, block_kv, q_len, kv_len, is_causal, None)
        return BlockMask.of(mask_of_tokens(grid, function, batch=batch, heads=heads, capacity=capacity))
    if of != "blocks":
        raise ValueError(f'of={of!r} must be "blocks" or "tokens"')
    if batch is not None or heads is not None:
        raise ValueError(f'{batch=} and {heads=} are for of="tokens"; a function of blocks returns [heads, nQ, nK]')
    if not _takes(function, 2):
        raise TypeError(f"a function of blocks takes (i, j), and this one takes {inspect.signature(function)}")
    g = _Blocks(q_len, kv_len, block_q, block_kv, is_causal)
    blocks = np.asarray(function(g.i, g.j))
    if blocks.dtype != np.bool_:
        raise TypeError(f"function must return booleans, got dtype {blocks.dtype}")
    return g.mask(np.atleast_2d(blocks), capacity)


def _takes(function: Callable, count: int) -> bool:
    """Whether a function can be called with so many arguments; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


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
