"""A cache in pages beside the same cache in one piece: pages in random order, NaN wherever no token lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import xsake
from xsake._op.arguments import build_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCase:
    query: Any
    key: Any
    value: Any
    key_pages: Any
    value_pages: Any
    table: np.ndarray
    mask: Any
    options: dict[str, Any]

    def plain(self, implementation, **changes):
        return xsake.attention(
            self.query, self.key, self.value, self.mask, implementation=implementation, **self.options, **changes
        )

    def paged(self, implementation, **changes):
        given = dict(page_table=self.table, implementation=implementation) | self.options | changes
        return xsake.attention(self.query, self.key_pages, self.value_pages, self.mask, **given)


def make(
    *,
    lengths,
    q_len,
    pages,
    page=128,
    heads=(2, 1),
    dim=64,
    blocks=None,
    density=0.6,
    list_heads=1,
    causal=True,
    dtype="bfloat16",
    seed=0,
    **options,
):
    """`pages` per sequence, of `page` tokens. `blocks`: (block_q, block_kv) of a random mask; without them it is dense.

    `lengths` None: every page is full, and the call has no lengths. `causal`: the queries are the last tokens.
    """
    rng = np.random.default_rng(seed)
    ends = [pages * page] if lengths is None else lengths
    batch, kv_len = len(ends), pages * page
    table = rng.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages).astype(np.int32)
    shapes = [(batch, q_len, heads[0], dim)] + [(batch, kv_len, heads[1], dim)] * 2
    query, key, value = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    in_pages = [np.full((batch * pages + 3, page, heads[1], dim), np.nan, np.float32) for _ in range(2)]
    for b, end in enumerate(ends):
        for x, made in zip((key, value), in_pages, strict=True):
            x[b, end:] = np.nan
            made[table[b]] = x[b].reshape(pages, page, heads[1], dim)
        table[b, -(-end // page) :] = -7 - b  # no page at all
    options = {"return_lse": True, **options}
    if lengths is not None:
        options["key_value_seq_lengths"] = np.array(lengths, np.int32)
    if causal:
        own = np.array(ends, np.int32)[:, None] - q_len + np.arange(q_len, dtype=np.int32)
        options |= dict(is_causal=True, positions=(own, np.arange(kv_len, dtype=np.int32)[None]))
    mask = None
    if blocks is not None:
        grid = (-(-q_len // blocks[0]), -(-kv_len // blocks[1]))
        active = rng.random((batch, list_heads, *grid)) < density
        mask = xsake.BlockMask.from_blocks(
            active, block_q=blocks[0], block_kv=blocks[1], q_len=q_len, kv_len=kv_len, transpose=False
        )
    arrays = dict(query=query, key=key, value=value, key_pages=in_pages[0], value_pages=in_pages[1])
    return PagedCase(
        **{name: jnp.asarray(x, dtype) for name, x in arrays.items()}, table=table, mask=mask, options=options
    )


def call(
    *, q_len, page=128, pages=256, heads=(12, 2), dim=128, blocks=(128, 128), list_heads=None, lengths=True, causal=True
):
    """The `Call` of a cache of 32k tokens, of zeros: for compilers."""
    kv_len = page * pages
    sizes = dict(block_q=blocks[0], block_kv=blocks[1], q_len=q_len, kv_len=kv_len)
    mask, options = None, {}
    if list_heads is not None:
        active = np.ones((list_heads, -(-q_len // blocks[0]), -(-kv_len // blocks[1])), bool)
        mask = xsake.BlockMask.from_blocks(active, **sizes, transpose=False)
    if lengths:
        options["key_value_seq_lengths"] = np.array([kv_len - 5], np.int32)
    if causal:
        options |= dict(is_causal=True, positions=(np.zeros((1, q_len), np.int32), np.zeros((1, kv_len), np.int32)))
    cache = jnp.zeros((pages, page, heads[1], dim), jnp.bfloat16)
    table = jnp.zeros((1, pages), jnp.int32)
    query = jnp.zeros((1, q_len, heads[0], dim), jnp.bfloat16)
    return build_call(query, cache, cache, mask, page_table=table, default_blocks=blocks, **options)


COMPILED = {
    "decode": dict(q_len=1),
    "decode, D 64, a list per head, pages of 64": dict(q_len=4, dim=64, page=64, pages=512, list_heads=12),
    "decode, no lengths": dict(q_len=1, lengths=False, causal=False),
    "decode, D 256": dict(q_len=1, dim=256),
    "decode, D 96": dict(q_len=1, dim=96),
    "a chunk": dict(q_len=4096),
    "a chunk, no lengths": dict(q_len=4096, lengths=False, causal=False),
    "a chunk, D 64, blocks of 64, a list per head": dict(q_len=4096, dim=64, blocks=(64, 64), list_heads=12),
    "a chunk, blocks of 64, a list per group, pages of 64": dict(
        q_len=4096, blocks=(64, 64), list_heads=2, page=64, pages=512
    ),
}
