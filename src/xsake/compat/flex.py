"""FlexAttention for JAX arrays: the names, layout and meaning of `torch.nn.attention.flex_attention`, on XSAKE.

A mask_mod may be any rule. A score_mod is read from its traced program, and refused by name where no argument of
`xsake.attention` expresses it: there is no fallback to dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

import xsake
from xsake._op.shapes import Arrays
from xsake.compat.score_rule import Recognised, at_places, indices_used, over_indices, traced
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.token_function import mask_of_tokens


def create_block_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    *,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The mask of `mask_mod(b, h, q_idx, kv_idx) -> bool`, a function of scalars in jax.numpy, exact to the element.

    None for B or H is 1: all batch entries or heads share the mask of number 0. A causal rule or a window that the
    function obeys everywhere becomes the mask's own rule; other blocks that it cuts get bitmaps.

    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512)
    >>> mask.is_causal, mask.bitmaps is None
    (True, True)
    """
    sides = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sides) != 2:
        raise ValueError(f"{BLOCK_SIZE=} must be an int, or (queries, keys) of a block")
    for name, size in (("B", B), ("H", H)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name}={size!r} must be an int of at least 1, or None")
    grid = Grid.of(*sides, Q_LEN, KV_LEN, is_causal=False, window=None)
    return _mask_of(mask_mod, B or 1, H or 1, grid, "mask_mod")


def and_masks(*mask_mods: Callable) -> Callable:
    """The mask_mod that allows what all of `mask_mods` allow."""
    return lambda *place: reduce(jnp.logical_and, [f(*place) for f in mask_mods], jnp.bool_(True))


def or_masks(*mask_mods: Callable) -> Callable:
    """The mask_mod that allows what any of `mask_mods` allows."""
    return lambda *place: reduce(jnp.logical_or, [f(*place) for f in mask_mods], jnp.bool_(False))


def flex_attention(
    query: Float[Arrays, "B H T D"],
    key: Float[Arrays, "B K S D"],
    value: Float[Arrays, "B K S Dv"],
    score_mod: Callable | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention whose scores go through `score_mod(score, b, h, q_idx, kv_idx)`, a function of scalars in jax.numpy.

    These score_mods run, and steps of one that do not are refused by name: factors that are numbers, biases of any
    indices (with gradients for the arrays that they read), a soft cap as the last step, and -inf in chosen places.

    Args:
      query: [B, H, T, D]; with `enable_gqa`, H is a multiple of the heads of key and value, [B, K, S, D].
      block_mask: of `create_block_mask`, or any `xsake.BlockMask`.
      scale: factor of the scores before the score_mod; D ** -0.5 by default.
      return_lse: also return the natural logarithm of the softmax's denominator, float32[B, H, T].

    A bias is formed as an array over the indices that it depends on, in float32: [1, H, T, S] for ALiBi. A row that
    attends nothing gives 0 and -inf.

    >>> import jax, jax.numpy as jnp
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 4, 256, 32))
    >>> flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 20 * jnp.tanh(score / 20)).shape
    (1, 4, 256, 32)
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", None) != 4:
            raise ValueError(
                f"{name} must be an array [batch, heads, tokens, dim]; got {type(x).__name__} of {np.shape(x)}"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: give enable_gqa=True for grouped heads"
        )
    q, k, v = (jnp.asarray(x).swapaxes(1, 2) for x in (query, key, value))
    options: dict[str, Any] = dict(scale=scale)
    if score_mod is not None:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        block_mask, options = _options_of(score_mod, sizes, block_mask, q.shape[3] ** -0.5 if scale is None else scale)
    found = xsake.attention(q, k, v, block_mask, return_lse=return_lse, **options)
    return tuple(x.swapaxes(1, 2) for x in found) if return_lse else found.swapaxes(1, 2)


def _options_of(
    score_mod: Callable, sizes: tuple[int, ...], mask: BlockMask | None, scale: float
) -> tuple[BlockMask | None, dict[str, Any]]:
    found = Recognised.of(score_mod, sizes)
    rule = found.rule
    inner = 1.0 if rule.outer is None else rule.outer  # c tanh(x) = |c| tanh(sign(c) x), and the op caps by |c|
    bias = None
    if rule.bias is not None:
        bias = over_indices(found.part("bias"), rule.bias.of, sizes)
        bias = bias.astype(jnp.float32) * np.float32(inner)
        if rule.outer is not None:  # tanh(-inf) is -1, and not deleted
            bias = jnp.clip(bias, jnp.finfo(jnp.float32).min, jnp.finfo(jnp.float32).max)
    if rule.keep is not None:
        batch, heads, q_len, kv_len = sizes
        blocks = (128, 128) if mask is None else (mask.block_q, mask.block_kv)
        grid = Grid.of(*blocks, q_len, kv_len, is_causal=False, window=None)
        kept = _mask_of(found.part("keep"), batch, heads, grid, "score_mod")
        mask = kept if mask is None else mask & kept
    cap = None if rule.outer is None else abs(rule.outer)
    return mask, dict(scale=scale * rule.factor * inner, bias=bias, logits_soft_cap=cap)


def _mask_of(mask_mod: Callable, batch: int, heads: int, grid: Grid, name: str) -> BlockMask:
    with jax.ensure_compile_time_eval():  # under a jit, a mask that no traced array enters is known, too
        program = traced(mask_mod, name)
        if program.out_avals[0].dtype != jnp.bool_:
            raise TypeError(f"{name} must return a boolean; it returns {program.out_avals[0]}")
        of = indices_used(program)
        sizes: dict[str, Any] = dict(batch=batch if 0 in of else 1, heads=heads if 1 in of else 1)
        attends: Callable
        if any(isinstance(x, jax.core.Tracer) for x in program.consts):

            def attends(*place: Any) -> Array:
                return at_places(mask_mod, *(jnp.asarray(x, jnp.int32).reshape(-1) for x in place))
        else:
            attends = _Known(mask_mod, grid, **sizes)
            grid = grid.with_band(attends.band())
        lists = mask_of_tokens(grid, attends, **sizes)
    return BlockMask.of(lists)


class _Known:
    """A mask_mod of no traced array, as one program for any rows of a block and all keys."""

    def __init__(self, mask_mod: Callable, grid: Grid, batch: int, heads: int):
        self._grid = grid
        b, h, keys = (np.arange(size, dtype=np.int32) for size in (batch, heads, grid.kv_len))
        self._run = jax.jit(lambda q: at_places(mask_mod, b, h, q, keys))

    def __call__(self, b: Any, h: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """bool[batch, heads, rows, columns] for q [rows, 1] and k [1, columns]; it is of all entries and heads."""
        return self._rows(q.reshape(-1))[..., k.reshape(-1)]

    def _rows(self, q: np.ndarray) -> np.ndarray:
        whole = np.resize(q, self._grid.block_q).astype(np.int32)  # of one length: one program
        return np.asarray(self._run(whole))[:, :, : q.size]

    def band(self) -> Band:
        """The rule that all elements obey, of the sides whose last offset attends wherever there is such a key.

        `mask_of_tokens` compares every element with the rule: a side more or less changes bitmaps, never the mask.
        """
        grid = self._grid
        first, last = [], []
        for start in range(0, grid.q_len, grid.block_q):
            rows = self._rows(np.arange(start, min(start + grid.block_q, grid.q_len)))
            some = rows.any(-1)
            first.append(np.where(some, rows.argmax(-1), grid.kv_len))
            last.append(np.where(some, grid.kv_len - 1 - rows[..., ::-1].argmax(-1), -1))
        q = np.arange(grid.q_len)
        before, after = q - np.concatenate(first, -1), np.concatenate(last, -1) - q
        left, right = int(before.max()), int(after.max())
        at_left, at_right = (q >= left) & (q - left < grid.kv_len), (q + right >= 0) & (q + right < grid.kv_len)
        return Band(
            left if 0 <= left < grid.q_len - 1 and (before == left)[..., at_left].all() else None,
            right if 0 <= right < grid.kv_len - 1 and (after == right)[..., at_right].all() else None,
        )
