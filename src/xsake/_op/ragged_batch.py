"""What a ragged batch is given: `Cache`, keys and values in pages, and `Batch`, which rows and pages are whose."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake._ground.device import on_host
from xsake._ground.integers import as_int32
from xsake._op import paged
from xsake._op.arguments import check_inputs
from xsake.hads.mask.lists.rows import rows_of_slots


class Cache(NamedTuple):
    """Keys and values in pages, for queries of `dim` channels."""

    key: Array
    value: Array
    joined_kv: bool
    dim: int
    value_dim: int

    @classmethod
    def of(cls, pages: Any, query: Array) -> Cache:
        if query.ndim != 3 or 0 in query.shape:
            raise ValueError(f"query must be [tokens, heads, head_dim], and not empty; got shape {query.shape}")
        dim = query.shape[2]
        if isinstance(pages, tuple | list):
            if len(pages) != 2:
                raise ValueError(f"pages must be one array or a pair (key, value); got {len(pages)} arrays")
            key, value = pages
            for name, x in (("keys", key), ("values", value)):
                if x.ndim != 4 or 0 in x.shape or x.shape[:3] != key.shape[:3]:
                    raise ValueError(
                        "pages must be a pair of [pages, page, heads, head_dim] with the same pages and heads; "
                        f"got {name} of shape {x.shape}"
                    )
            return cls(key, value, False, dim, value.shape[-1])._checked(query)
        one = pages
        if one.ndim not in (4, 5) or 0 in one.shape:
            raise ValueError(
                "pages must be a pair (key, value), or one array [pages, page, 2 * heads, head_dim], which may be "
                f"packed: [pages, page, 2 * heads / packing, packing, head_dim]; got shape {one.shape}"
            )
        one = one.reshape(*one.shape[:2], -1, one.shape[-1])
        if one.shape[2] % 2 or one.shape[3] < dim:
            raise ValueError(
                f"pages of keys and values by turns need an even number of heads, and at least the query's head_dim "
                f"{dim}; got {one.shape[2]} heads of {one.shape[3]}"
            )
        return cls(one, one, True, dim, dim)._checked(query)

    def _checked(self, query: Array) -> Cache:
        """The cache, which suits the query as keys and values of `xsake.attention` must."""

        def of_shape(x: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((1, *shape), x.dtype)

        pages, page, heads, stored = self.key.shape
        heads //= 2 if self.joined_kv else 1
        keys, values = ((pages * page, heads, x.shape[3]) for x in (self.key, self.value))
        dim = stored if self.joined_kv else query.shape[2]
        check_inputs(of_shape(query, *query.shape[:2], dim), of_shape(self.key, *keys), of_shape(self.value, *values))
        return self

    @property
    def page(self) -> int:
        return self.key.shape[1]

    def keys_of(self, table: Int[Array, "n"]) -> Float[Array, "S K D"]:
        """A copy of the keys in these pages; of a page that does not exist, those of another."""
        own = self.key[jnp.clip(table, 0, len(self.key) - 1)]
        if self.joined_kv:
            own = own[:, :, ::2, : self.dim]
        return own.reshape(-1, *own.shape[2:])

    def padded(self, query: Array) -> Array:
        """The query, with zeros up to the cache's head_dim."""
        more = self.key.shape[3] - query.shape[-1]
        return query if more <= 0 else jnp.pad(query, [(0, 0)] * (query.ndim - 1) + [(0, more)])


class Batch(NamedTuple):
    """Which rows of the query and which pages belong to which request."""

    cu_seqlens: Int[Array, "B_and_one"]
    kv_lengths: Int[Array, "B"]
    page_table: Int[Array, "B n"]
    wrong: Bool[Array, "B"] | None  # None where every number is known to be right

    @classmethod
    def of(cls, query: Array, cache: Cache, cu_seqlens: Any, kv_lengths: Any, page_table: Any) -> Batch:
        given = {"cu_seqlens": cu_seqlens, "kv_lengths": kv_lengths, "page_table": page_table}
        for name, x in given.items():
            array: Any = x if hasattr(x, "dtype") else np.asarray(x)
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
            given[name] = as_int32(name, array)
        cu, lengths, table = given.values()
        if cu.ndim != 1 or len(cu) < 2:
            raise ValueError(f"cu_seqlens must be [requests + 1]; got shape {cu.shape}")
        requests = len(cu) - 1
        if lengths.shape != (requests,):
            raise ValueError(f"kv_lengths must be [{requests}], as cu_seqlens have requests; got shape {lengths.shape}")
        if table.ndim != 2 or table.shape[0] != requests or table.shape[1] < 1:
            raise ValueError(f"page_table must be [{requests}, pages per request]; got shape {table.shape}")
        room = query.shape[0], table.shape[1] * cache.page
        traced = any(isinstance(x, jax.core.Tracer) for x in (cu, lengths))
        if not traced:
            _check(on_host(cu), on_host(lengths), *room)
        cu, lengths, table = (jnp.asarray(x) for x in (cu, lengths, table))
        wrong = paged.wrong_pages(table, cache.key.shape, jnp.where(_queries(cu) > 0, lengths, 0))
        if traced:
            unfit = _unfit(cu, lengths, *room)
            wrong = unfit if wrong is None else wrong | unfit
        return cls(cu, lengths, table, wrong)

    @property
    def requests(self) -> int:
        return len(self.kv_lengths)

    @property
    def queries(self) -> Int[Array, "B"]:
        return _queries(self.cu_seqlens)

    @property
    def starts(self) -> Int[Array, "B"]:
        """The position of each request's first query."""
        return self.kv_lengths - self.queries

    def owners(self, tokens: int) -> Int[Array, "T"]:
        """The request of each query; that of padding does not matter."""
        return jnp.minimum(rows_of_slots(jnp, self.cu_seqlens, tokens), self.requests - 1)

    def finished(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Results by token [T, ...]: (output, lse) with padding as documented, and NaN for requests that are wrong."""
        token = jnp.arange(len(out), dtype=jnp.int32)
        padding = token >= self.cu_seqlens[-1]
        if self.wrong is not None:
            wrong = self.wrong[self.owners(len(out))]
            out, lse = jnp.where(wrong[:, None, None], jnp.nan, out), jnp.where(wrong[:, None], jnp.nan, lse)
        return jnp.where(padding[:, None, None], 0, out), jnp.where(padding[:, None], -math.inf, lse)


def _queries(cu: Array) -> Array:
    return cu[1:] - cu[:-1]


def _check(cu: np.ndarray, lengths: np.ndarray, tokens: int, slots: int) -> None:
    queries = np.diff(cu)
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0; got {cu[0]}")
    if (queries < 0).any():
        at = int(np.argmax(queries < 0))
        raise ValueError(f"cu_seqlens must not fall; got {cu[at]} and then {cu[at + 1]} at {at + 1}")
    if cu[-1] > tokens:
        raise ValueError(f"cu_seqlens end at {cu[-1]}, and query has {tokens} tokens")
    asks = queries > 0
    for wrong, what in (
        (asks & (lengths < queries), "fewer than its queries: the queries' own keys must be in the cache"),
        (asks & (lengths > slots), f"more than the {slots} that its pages in page_table hold"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"request {at} has {queries[at]} queries and kv_lengths[{at}]={lengths[at]}, {what}")


def _unfit(cu: Array, lengths: Array, tokens: int, slots: int) -> Array:
    """What `_check` refuses, bool[B], of traced numbers."""
    queries = _queries(cu)
    broken = (cu[0] != 0) | (queries < 0).any() | (cu[-1] > tokens)
    return ((queries > 0) & ((lengths < queries) | (lengths > slots))) | broken
