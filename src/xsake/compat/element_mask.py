"""One mask from all that a call says of elements: an attention mask, masks per head, intervals of blocks, a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xsake._ground.device import on_host
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.rows import at
from xsake.hads.mask.token_function import mask_of_tokens

Sizes = dict[str, Any]  # block_q, block_kv, q_len, kv_len


def as_elements(attention_mask: Any, batch: int, heads: int, sizes: Sizes) -> Any:
    """bool[B | 1, H | 1, T, S] from a boolean or integer mask of 2 to 4 dimensions that broadcasts to it."""
    given: Any = attention_mask if isinstance(attention_mask, jax.core.Tracer) else on_host(attention_mask)
    if given.dtype != np.bool_ and not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"attention_mask must be boolean or integer (1 attends), got dtype {given.dtype}")
    if given.ndim == 3:  # [batch, tokens, keys]
        given = given[:, None]
    want = (batch, heads, sizes["q_len"], sizes["kv_len"])
    given = given.reshape((1,) * (4 - given.ndim) + given.shape) if given.ndim < 4 else given
    if given.ndim != 4 or any(have not in (1, size) for have, size in zip(given.shape, want, strict=True)):
        raise ValueError(
            f"attention_mask must broadcast to [batch, heads, queries, keys]={list(want)}; got shape "
            f"{np.shape(attention_mask)}"
        )
    return given != 0


def mask_of(
    sizes: Sizes,
    batch: int,
    *,
    elements: Any = None,
    of_heads: Sequence[Any] | None = None,
    blocks: Any = None,
    band: Band,
) -> BlockMask:
    """The mask of what all given parts allow.

    `elements` is bool[B | 1, H | 1, T | 1, S | 1]; `of_heads` has an object per head that gives booleans for
    [queries, keys] slices; `blocks` is bool[B | 1, H | 1, nQ, nK]; `band` is a rule of indices.
    """
    grid = Grid.of(**sizes, is_causal=False, window=None)
    if elements is None and of_heads is None:
        rule = dataclasses.asdict(grid.with_band(band))
        return BlockMask.full(**rule) if blocks is None else BlockMask.from_blocks(blocks, **rule)
    parts = [x for x in (elements, blocks) if x is not None]
    heads = max([x.shape[1] for x in parts] + [1 if of_heads is None else len(of_heads)])
    entries = max([x.shape[0] for x in parts], default=1)
    whole = None
    if of_heads is not None:
        whole = _OfHeads(of_heads, sizes)

    def attends(b: Any, h: Any, q: Any, k: Any) -> Any:
        ok = band.allows(k - q) & (h >= 0) & (b >= 0) & (q >= 0) & (k >= 0)
        if elements is not None:
            ok = ok & at(elements, b, h, q, k)
        if blocks is not None:
            ok = ok & at(blocks, b, h, q // sizes["block_q"], k // sizes["block_kv"])
        if whole is not None:
            ok = ok & whole(h, q, k)
        return ok

    return BlockMask.of(mask_of_tokens(grid, attends, batch=min(entries, batch), heads=heads))


class _OfHeads:
    """Masks that give booleans for slices, as those of splash attention do, for arrays of indices."""

    def __init__(self, masks: Sequence[Any], sizes: Sizes):
        want = (sizes["q_len"], sizes["kv_len"])
        for h, mask in enumerate(masks):
            if not hasattr(mask, "__getitem__") or tuple(getattr(mask, "shape", want)) != want:
                raise TypeError(
                    f"mask_builder must give, for every head, a mask of shape {want} that can be indexed by slices; "
                    f"for head {h} it gave {type(mask).__name__} {getattr(mask, 'shape', '')}"
                )
        self._masks = masks

    def __call__(self, h: Any, q: Any, k: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in (h, q, k)):
            raise NotImplementedError(
                "mask_builder together with a traced attention_mask: give one mask, or give attention_mask outside jit"
            )
        heads, rows, columns = np.atleast_1d(np.ravel(h)), np.ravel(q), np.ravel(k)
        first, last = int(rows[0]), int(rows[-1])
        of_rows = [np.asarray(self._masks[i][first : last + 1, 0 : int(columns.max()) + 1]) for i in heads]
        found = np.stack([x.astype(bool)[:, columns] for x in of_rows])
        return found[0] if np.ndim(h) == 0 else found.reshape(1, *found.shape) if np.ndim(h) == 4 else found
