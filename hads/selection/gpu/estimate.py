"""`selection.pooled` and `selection.estimate` as GPU kernels: no logit of a single key is written to memory.

Three steps: the pooled features of queries and keys, with the weights applied; the tokens' feature of every pair of
blocks; the sum of all terms, tile by tile. Products of 16-bit numbers are summed in float32: an estimate needs no more.

They serve the queries of a whole sequence, and the queries of a chunk against all keys up to its end (`Rows`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake._ground.trace import interpreting
from xsake.hads.mask.lists.triton_call import TILE, Output, iota, padded, triton_call
from xsake.hads.profile.estimator import BUCKETS, Estimator
from xsake.hads.selection.pooled import KIND_OF_PART, key_parts, query_parts, variance
from xsake.hads.selection.rows import Rows

_PARTS = len(KIND_OF_PART)
_CHUNK, _PROGRAMS = 16, 1024  # at most so many blocks of keys per program, at least so many programs
_MOST_HEADS_PER_PROGRAM = 2  # query heads that share one reading of the keys
_POOLED_PER_WARP = 8192  # numbers of 16 bits: 256 per thread, two in each register
_TOKENS_WARPS, _TOKENS_STAGES = 8, 2
_SUM_WARPS, _SUM_STAGES = 4, 2
_LOG2_E = math.log2(math.e)


def block_logits(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    estimator: Estimator,
    rows: Rows,
    k_features: Float[Array, "B K blocks five D"] | None = None,
) -> Float[Array, "B H m width"]:
    """`estimate.block_logits`, `padded`; entries above the diagonal or past the last row are not written.

    Queries are the tokens of `rows`. Keys may be a cache: keys past the grid's end are not read. `k_features` are the
    `PooledKeys.features` of the keys, where they are known.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    heads_per_program = math.gcd(heads // kv_heads, _MOST_HEADS_PER_PROGRAM)
    q_mean, q_features = _pool_queries(query, estimator, rows, heads_per_program)
    m, _ = padded(rows.grid.columns)
    if k_features is None:
        k_features = pool_keys(key, rows, room=m)
    elif k_features.shape[2] < m:
        k_features = jnp.pad(k_features, ((0, 0), (0, 0), (0, m - k_features.shape[2]), (0, 0), (0, 0)))
    tokens = _tokens(q_mean, key, k_features, rows)
    return _sum(q_features, k_features, tokens, estimator, rows, heads_per_program)


# -- pooled features -------------------------------------------------------------------------------------------------


def _pool_queries(
    query: Float[Array, "B T H D"], estimator: Estimator, rows: Rows, heads_per_program: int
) -> tuple[Array, Array]:
    """Means, [B, H / heads_per_program, tiles, heads_per_program * TILE, D], and weighted features, [B, H, m, 5, D].

    Means are scaled so that their products with keys are logits in base 2.
    """
    b, _, h, d = query.shape
    m, _ = padded(rows.number)
    block_q, root, parts = rows.grid.block_q, d**-0.5, h // heads_per_program
    weights = jnp.asarray(estimator.features, jnp.float32)
    kinds, pairs = weights.shape[1:]

    def kernel(x_ref: Any, weights_ref: Any, length_ref: Any, mean_ref: Any, features_ref: Any) -> None:
        tokens = rows.tokens_in(rows.first + pl.program_id(1), block_q, length_ref)
        mean, spread = _moments(x_ref, tokens)
        mean_ref[...] = (mean * (root * _LOG2_E)).astype(mean_ref.dtype)
        shape = heads_per_program, d
        head, dim = jnp.broadcast_to(iota(shape[0])[:, None], shape), jnp.broadcast_to(iota(d)[None], shape)
        for number, (kind, part) in enumerate(zip(KIND_OF_PART, query_parts(mean, spread), strict=True)):
            weight = plgpu.load(weights_ref.at[head, kind, lax.rem(dim, pairs)])  # as `spread_weights`
            features_ref[:, number, :] = (part * weight).astype(features_ref.dtype)

    def mean_at(part: Any, i: Any, b: Any) -> tuple:
        return b, part, lax.div(i, TILE), 0, lax.rem(i, TILE), 0

    mean, features = triton_call(
        kernel,
        "hads_pool_queries",
        (parts, rows.number, b),
        [
            (query, _block_of_heads(block_q, heads_per_program, d)),
            (weights, pl.BlockSpec((heads_per_program, kinds, pairs), lambda part, i, b: (part, 0, 0))),
            rows.input(b),
        ],
        [
            (
                (b, parts, m // TILE, heads_per_program, TILE, d),
                query.dtype if query.dtype.itemsize == 2 else jnp.bfloat16,
                pl.BlockSpec((None, None, None, heads_per_program, None, d), mean_at),
            ),
            _features(b, h, m, heads_per_program, d, jnp.bfloat16),
        ],
        num_warps=_pool_warps(block_q * heads_per_program * d, spills=query.dtype.itemsize > 2),
    )
    return mean.reshape(b, parts, m // TILE, heads_per_program * TILE, d), features


def pool_keys(
    key: Float[Array, "B T K D"],
    rows: Rows,
    *,
    room: int = 0,
    into: Float[Array, "B K blocks five D"] | None = None,
) -> Float[Array, "B K blocks five D"]:
    """The keys' side of the features, of the tokens of `rows`; blocks without tokens are 0.

    In bfloat16, with `room` for so many blocks, of which those past the rows are not written; or `into` the features
    of a cache, in the rows' places.
    """
    b, _, kv_heads, d = key.shape
    block, first = rows.grid.block, rows.first_block
    shape, dtype, of_block = _features(b, kv_heads, room, 1, d, jnp.bfloat16)
    inputs = [(key, _block_of_heads(block, 1, d)), rows.input(b)]
    if into is not None:
        of_block = pl.BlockSpec((None, 1, None, _PARTS, d), lambda h, i, b: (b, h, first + i, 0, 0))
        shape, dtype = into.shape, into.dtype
        inputs.append((into, of_block))

    def kernel(x_ref: Any, length_ref: Any, *refs: Any) -> None:
        features_ref = refs[-1]
        tokens = rows.tokens_in(first + pl.program_id(1), block, length_ref)
        mean, spread = _moments(x_ref, tokens)
        largest = _tokens_of(x_ref, tokens, -jnp.inf).astype(jnp.float32).max(0)
        smallest = _tokens_of(x_ref, tokens, jnp.inf).astype(jnp.float32).min(0)
        if tokens is not None:
            largest, smallest = (jnp.where(tokens > 0, x, 0.0) for x in (largest, smallest))
        for number, part in enumerate(key_parts(mean, spread, largest, smallest)):
            features_ref[:, number, :] = part.astype(features_ref.dtype)

    (features,) = triton_call(
        kernel,
        "hads_pool_keys",
        (kv_heads, rows.grid.columns - first, b),
        inputs,
        [(shape, dtype, of_block)],
        # With 256 numbers per thread the compiler spills where head_dim is 256, and where blocks are short.
        num_warps=_pool_warps(block * d, spills=key.dtype.itemsize > 2 or d > 128 or rows.short),
        aliases={} if into is None else {2: 0},
    )
    return features


def _pool_warps(numbers: int, *, spills: bool) -> int:
    """`spills`: a warp has registers for half of `_POOLED_PER_WARP` numbers only."""
    return max(numbers // (_POOLED_PER_WARP // 2 if spills else _POOLED_PER_WARP), 1)


def _features(b: int, heads: int, m: int, heads_per_program: int, d: int, dtype: Any) -> Output:
    spec = pl.BlockSpec((None, heads_per_program, None, _PARTS, d), lambda h, i, b: (b, h, i, 0, 0))
    return (b, heads, m, _PARTS, d), dtype, spec


def _block_of_heads(block: int, heads_per_program: int, d: int) -> pl.BlockSpec:
    """Heads before blocks: neighbouring programs read neighbouring memory."""
    return pl.BlockSpec((None, block, heads_per_program, d), lambda h, i, b: (b, i, h, 0))


def _tokens_of(ref: Any, tokens: Array | None, other: float) -> Array:
    """This program's block, `other` past its tokens."""
    if tokens is None:
        return ref[...]
    inside = jnp.broadcast_to((iota(ref.shape[0]) < tokens)[:, None, None], ref.shape)
    return plgpu.load(ref.at[...], mask=inside, other=other)


def _moments(ref: Any, tokens: Array | None) -> tuple[Array, Array]:
    """Mean and variance of this program's block; memory past its tokens does not count."""
    x = _tokens_of(ref, tokens, 0.0).astype(jnp.float32)
    share = 1 / _size(tokens, ref.shape[0])
    mean = x.sum(0) * share
    return mean, variance((x * x).sum(0) * share, mean)


def _size(tokens: Array | None, size: int) -> Any:
    """The divisor of a mean over a block's tokens."""
    return float(size) if tokens is None else jnp.maximum(tokens, 1).astype(jnp.float32)


# -- the tokens' feature ---------------------------------------------------------------------------------------------


def _tokens(
    mean: Float[Array, "B parts tiles R D"],
    key: Float[Array, "B S K D"],
    k_features: Float[Array, "B K blocks 5 D"],
    rows: Rows,
) -> Float[Array, "B parts tiles m R"]:
    """The log of the mean exponential of the logits of a tile's mean queries with each block's keys."""
    b, parts, tiles, in_tile, d = mean.shape
    grid, kv_heads = rows.grid, key.shape[2]
    chunk = _chunk(b * parts * tiles * grid.columns)
    chunks = -(-grid.columns // chunk)
    m, _ = padded(grid.columns)

    def kernel(mean_ref: Any, key_ref: Any, features_ref: Any, length_ref: Any, out_ref: Any) -> None:
        tile, first = lax.div(pl.program_id(0), chunks), lax.rem(pl.program_id(0), chunks) * chunk
        q = mean_ref[...]

        def step(j: Array, about: Array) -> Array:
            tokens = rows.tokens_in(j, grid.block, length_ref)
            here = key_ref.at[pl.ds(j * grid.block, grid.block), :]
            if tokens is None:
                k = here[...]
            else:
                exists = iota(grid.block) < tokens
                k = plgpu.load(here, mask=jnp.broadcast_to(exists[:, None], (grid.block, d)), other=0.0)
            above = _exp2(_rows_by_rows(q, k.astype(q.dtype)) - about[:, None])
            if tokens is not None:
                above = jnp.where(exists[None, :], above, 0.0)
            out = _log2_from(about, above.sum(1) / _size(tokens, grid.block))
            out_ref[j, :] = out * (1 / _LOG2_E)
            return out

        # Exponents are taken about the result of the block before: this saves a pass for the largest logit or the mean.
        about = (q.astype(jnp.float32) * features_ref[first, 0, :].astype(jnp.float32)[None, :]).sum(1)
        seen = (rows.first + (tile + 1) * TILE) * grid.tall
        last = jnp.minimum(jnp.minimum(seen, first + chunk), grid.columns)
        lax.fori_loop(first, last, step, about)

    def at(place: Any, part: Any, b: Any) -> tuple:
        return b, part, lax.div(place, chunks), 0, 0

    def kv_head(part: Any) -> Any:
        return lax.div(part, parts // kv_heads)

    (out,) = triton_call(
        kernel,
        "hads_tokens",
        (tiles * chunks, parts, b),
        [
            (mean, pl.BlockSpec((None, None, None, in_tile, d), at)),
            (key, pl.BlockSpec((None, grid.columns * grid.block, None, d), lambda _, p, b: (b, 0, kv_head(p), 0))),
            (k_features, pl.BlockSpec((None, None, m, _PARTS, d), lambda _, p, b: (b, kv_head(p), 0, 0, 0))),
            rows.input(b),
        ],
        [((b, parts, tiles, m, in_tile), jnp.float32, pl.BlockSpec((None, None, None, m, in_tile), at))],
        num_warps=_TOKENS_WARPS,
        num_stages=_TOKENS_STAGES,
    )
    return out


def _chunk(tiles: int) -> int:
    """Blocks of keys per program: few where there is little to do, so that every processor has work."""
    return min(max(pl.next_power_of_2(tiles // _PROGRAMS + 1) // 2, 4), _CHUNK)


def _log2_from(about: Array, average: Array) -> Array:
    """The logarithm of a mean of exponentials that were taken about a number; no block exceeds it by 2 ** 120."""
    return about + jnp.log2(jnp.clip(average, 2.0**-120, 2.0**120))


def _exp2(x: Array) -> Array:
    if interpreting():
        return jnp.exp2(x)
    # jnp.exp2 takes four instructions more for denormals, which are 0 here.
    asm = "ex2.approx.ftz.f32 $0, $1;"
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[like])[0]


# -- their sum -------------------------------------------------------------------------------------------------------


def _sum(
    q_features: Float[Array, "B H rows 5 D"],
    k_features: Float[Array, "B K blocks 5 D"],
    tokens: Float[Array, "B parts tiles m R"],
    estimator: Estimator,
    rows: Rows,
    heads_per_program: int,
) -> Float[Array, "B H rows width"]:
    b, h, m_rows, _, d = q_features.shape
    group = h // k_features.shape[1]
    m, width = padded(rows.grid.columns)
    tall = rows.grid.tall
    by_bucket = jnp.asarray(estimator.distance)
    buckets = by_bucket.shape[1]

    def kernel(
        q_ref: Any, k_ref: Any, tokens_ref: Any, distance_ref: Any, weight_ref: Any, sink_ref: Any, out_ref: Any
    ) -> None:
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j * TILE < (rows.first + (i + 1) * TILE) * tall)
        def _() -> None:
            here = pl.ds(j * TILE, TILE)

            def add(part: Array, total: Array) -> Array:
                return total + _rows_by_rows(k_ref[here, part, :].astype(q_ref.dtype), q_ref[:, part, :])

            # In the tokens' feature the axis of keys comes first.
            sums = lax.fori_loop(0, _PARTS, add, jnp.zeros((TILE, TILE), jnp.float32))
            sums = (sums + weight_ref[0] * tokens_ref[here, :]).T
            row, column = (rows.first + i * TILE + iota(TILE))[:, None], (j * TILE + iota(TILE))[None, :]
            sums = (
                sums
                + plgpu.load(distance_ref.at[_bucket((row + 1) * tall - 1 - column)])
                + jnp.where(column == 0, sink_ref[0], 0.0)
            )
            out_ref[:, here] = sums

    def of_head(x: Array | np.ndarray) -> tuple[Array, pl.BlockSpec]:
        return jnp.asarray(x)[:, None], pl.BlockSpec((None, 1), lambda i, j, x: (x % h, 0))

    def tokens_at(i: Any, j: Any, x: Any) -> tuple:
        return x // h, x % h // heads_per_program, i, 0, x % heads_per_program

    (out,) = triton_call(
        kernel,
        "hads_block_logits",
        (m_rows // TILE, m // TILE, b * h),
        [
            (q_features, pl.BlockSpec((None, None, TILE, _PARTS, d), lambda i, j, x: (x // h, x % h, i, 0, 0))),
            (
                k_features,
                pl.BlockSpec((None, None, m, _PARTS, d), lambda i, j, x: (x // h, x % h // group, 0, 0, 0)),
            ),
            (tokens, pl.BlockSpec((None, None, None, m, TILE), tokens_at)),
            (by_bucket, pl.BlockSpec((None, buckets), lambda i, j, x: (x % h, 0))),
            of_head(estimator.tokens),
            of_head(estimator.sink),
        ],
        [
            (
                (b, h, m_rows, width),
                jnp.float32,
                pl.BlockSpec((None, None, TILE, width), lambda i, j, x: (x // h, x % h, i, 0)),
            )
        ],
        num_warps=_SUM_WARPS,
        num_stages=_SUM_STAGES,
    )
    return out


def _bucket(distance: Array) -> Array:
    """`bucket_of`. There are two buckets for each power of two, which the first bits of a float tell."""
    bits = lax.bitcast_convert_type(jnp.maximum(distance, 0).astype(jnp.float32), jnp.int32)
    of_one = 254  # 127, the exponent of 1.0, and a bit of the mantissa
    bucket = jnp.minimum((bits >> 22) - of_one, len(BUCKETS) - 1)
    return jnp.where(distance >= 2, bucket, jnp.maximum(distance, 0))


def _rows_by_rows(a: Array, b: Array) -> Array:
    """a @ b.T in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
