"""Random ragged batches, and what dense attention of float64 gives each request."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that a program is compiled for."""

    tokens: int = 96
    requests: int = 5
    pages: int = 6  # of a request
    page: int = 16
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    stored_dim: int | None = None  # of pages with keys and values joined; None for keys and values apart
    packing: int = 1
    dtype: str = "float32"

    @property
    def slots(self) -> int:
        return self.pages * self.page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    query: np.ndarray
    pages: object
    cu_seqlens: np.ndarray
    kv_lengths: np.ndarray
    page_table: np.ndarray
    keys: list  # of each request, [length, K, D]
    values: list

    def arguments(self) -> tuple:
        return self.query, self.pages, self.cu_seqlens, self.kv_lengths, self.page_table

    def alone(self, b: int) -> Batch:
        """Request b by itself, in arrays of the same sizes: the program is the same."""
        first, end = self.cu_seqlens[b : b + 2]
        query = np.zeros_like(self.query)
        query[: end - first] = self.query[first:end]
        cu = np.where(np.arange(len(self.cu_seqlens)) > 0, end - first, 0).astype(np.int32)
        lengths, table = np.zeros_like(self.kv_lengths), np.full_like(self.page_table, -1)
        lengths[0], table[0] = self.kv_lengths[b], self.page_table[b]
        return dataclasses.replace(self, query=query, cu_seqlens=cu, kv_lengths=lengths, page_table=table)


def make(shape: Shape, rng: np.random.Generator, *, most: int | None = None) -> Batch:
    """Prompts, chunks, new tokens and empty requests, in any order; NaN wherever no token lies.

    `most` queries per request, where it is given. Some requests share their first pages.
    """
    left, cu, lengths = shape.tokens - int(rng.integers(0, 9)), [0], []
    for _ in range(shape.requests):
        kind, room = rng.integers(0, 4), min(left, shape.slots, most or shape.slots)
        new = int([0, min(1, room), rng.integers(0, room + 1), room][kind])
        before = int(rng.integers(0, shape.slots - new + 1)) if kind != 3 else 0
        lengths.append(before + new if new else int(rng.integers(0, shape.slots)))
        cu.append(cu[-1] + new)
        left -= new
    count = shape.requests * shape.pages + 2
    table = rng.permutation(count)[: shape.requests * shape.pages].reshape(shape.requests, -1).astype(np.int32)
    q_heads, kv_heads = shape.heads
    query = rng.standard_normal((shape.tokens, q_heads, shape.dim)).astype(np.float32)
    query[cu[-1] :] = np.nan
    stored = [np.full((count, shape.page, kv_heads, shape.dim), np.nan, np.float32) for _ in range(2)]
    keys, values = [], []
    for b, length in enumerate(lengths):
        shared = min(int(rng.integers(0, 3)), lengths[b - 1] // shape.page, length // shape.page) if b else 0
        table[b, :shared] = table[b - 1, :shared]
        pair = rng.standard_normal((2, length, kv_heads, shape.dim)).astype(jnp.dtype(shape.dtype)).astype(np.float32)
        for x, cache, own in zip(pair, stored, (keys, values), strict=True):
            if shared:
                x[: shared * shape.page] = own[b - 1][: shared * shape.page]
            own.append(x)
            for i in range(-(-length // shape.page)):
                part = x[i * shape.page : (i + 1) * shape.page]
                cache[table[b, i], : len(part)] = part
        table[b, -(-length // shape.page) :] = rng.choice([-7, count + 3])
    return Batch(
        query=jnp.asarray(query, shape.dtype),
        pages=_stored(shape, stored),
        cu_seqlens=np.array(cu, np.int32),
        kv_lengths=np.array(lengths, np.int32),
        page_table=table,
        keys=keys,
        values=values,
    )


def _stored(shape: Shape, stored: list) -> object:
    if shape.stored_dim is None:
        return tuple(jnp.asarray(x, shape.dtype) for x in stored)
    one = np.stack(stored, 3).reshape(*stored[0].shape[:2], -1, shape.dim)
    one = np.pad(one, ((0, 0),) * 3 + ((0, shape.stored_dim - shape.dim),))
    return jnp.asarray(one.reshape(*one.shape[:2], -1, shape.packing, shape.stored_dim), shape.dtype)


def expected(batch: Batch, *, scale=None, window=None, sinks=None, cap=None, causal=True) -> tuple:
    """(output, lse) in float64."""
    query = np.asarray(batch.query, np.float64)
    tokens, heads, dim = query.shape
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    for b, (first, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        if first == end:
            continue
        key, value = (np.repeat(x.astype(np.float64), heads // x.shape[1], 1) for x in (batch.keys[b], batch.values[b]))
        x = np.einsum("thd,shd->hts", query[first:end], key) * (dim**-0.5 if scale is None else scale)
        x = x if cap is None else cap * np.tanh(x / cap)
        back = (batch.kv_lengths[b] - (end - first) + np.arange(end - first))[:, None] - np.arange(len(key))[None]
        left, right = window or (None, None)
        ok = np.ones_like(back, bool) if not causal else back >= 0
        ok &= (back <= left) if left is not None else True
        ok &= (-back <= right) if right is not None else True
        x = np.where(ok, x, -np.inf)
        if sinks is not None:
            x = np.concatenate(
                [x, np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (heads, end - first, 1))], -1
            )
        peak = x.max(-1, keepdims=True)
        weight = np.exp(x - peak)
        lse[first:end] = (np.log(weight.sum(-1)) + peak[..., 0]).T
        out[first:end] = np.einsum("hts,shd->thd", (weight / weight.sum(-1, keepdims=True))[..., : len(key)], value)
    return out, lse


changed = dataclasses.replace
