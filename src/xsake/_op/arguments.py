"""From the arguments of `xsake.attention` to a validated `Call`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.integers import as_int32
from xsake._ground.trace import known_flag
from xsake._op.partition import cut_alike
from xsake.backend.contract import Call
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.row_shards import RowShards

Size = Any  # an int, or a batch size that `jax.export` does not know yet


def check_inputs(query: Any, key: Any, value: Any) -> None:
    """Shapes and dtypes of the three arrays."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, length, heads, head_dim]; got shape {tuple(x.shape)}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point (bfloat16, float16 or float32); got dtype {x.dtype}")
        if not all(isinstance(size, int) for size in x.shape[1:]):
            raise NotImplementedError(
                f"{name} has the symbolic shape {tuple(x.shape)}; of the four sizes only the batch may be symbolic: "
                f"export a program for each length, and pad shorter sequences with key_value_seq_lengths"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty; got shape {tuple(x.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have one dtype; got query.dtype={query.dtype}, key.dtype={key.dtype}, "
            f"value.dtype={value.dtype}"
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(
            f"query, key and value must have one batch size; got {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have one length; got {key.shape[1]} and {value.shape[1]}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key and value must have the same heads; got {key.shape[2]} and {value.shape[2]}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head_dim; got {query.shape[3]} and {key.shape[3]}")
    num_q_heads, num_kv_heads = query.shape[2], key.shape[2]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be divisible by {num_kv_heads=}")


class Sizes(NamedTuple):
    """The sizes that arguments must agree with."""

    batch: Size
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int


class Arguments(NamedTuple):
    """The arrays of a call besides query, key and value, checked."""

    positions: tuple[Array, Array] | tuple[None, None]  # i32[B, T] and i32[B, S]
    segments: tuple[Array, Array] | tuple[None, None]
    lengths: tuple[Array | None, Array | None]  # i32[B] of queries, and of keys
    bias: Array | None
    sink_lse: Array | None  # [1, H]


def check_arguments(
    sizes: Sizes,
    *,
    bias: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    segment_ids: Any,
    positions: Any,
    sinks: Any,
    bias_keys: int | None = None,
) -> Arguments:
    """The arguments, which must have the shapes and dtypes that `sizes` ask for; bias has `bias_keys`, or all keys."""
    batch, q_len, kv_len, num_q_heads, _ = sizes
    return Arguments(
        positions=_tokens("positions", positions, batch, q_len, kv_len),
        segments=_tokens("segment_ids", segment_ids, batch, q_len, kv_len),
        lengths=(
            _lengths("query_seq_lengths", query_seq_lengths, batch),
            _lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        ),
        bias=None if bias is None else _check_bias(bias, (batch, num_q_heads, q_len, bias_keys or kv_len)),
        sink_lse=_sink_lse(sinks, num_q_heads),
    )


def check_mask(mask: BlockMask | RowShards, sizes: Sizes) -> None:
    batch, q_len, kv_len, num_q_heads, num_kv_heads = sizes
    if (mask.grid.q_len, mask.grid.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"mask is for {mask.grid.q_len} queries x {mask.grid.kv_len} keys, but query has {q_len=} and key has "
            f"{kv_len=}"
        )
    if mask.batch not in (1, batch):
        raise ValueError(f"mask has batch {mask.batch}; it must be 1 or the query's {batch=}")
    if mask.heads not in (1, num_kv_heads, num_q_heads):
        raise ValueError(f"mask has {mask.heads} heads; it must be 1, {num_kv_heads=} or {num_q_heads=}")


def build_call(
    query: Array,
    key: Array,
    value: Array,
    mask: BlockMask | None,
    *,
    default_blocks: tuple[int, int],
    bias: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    local_window_size: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
    sinks: Any = None,
    deterministic: Any = True,
    logits_soft_cap: Any = None,
    page_table: Array | None = None,
    joined_kv: bool = False,
) -> Call:
    """The validated call. `check_inputs` must have passed (and `paged`'s checks); all other arguments are checked."""
    batch, q_len, num_q_heads, head_dim = query.shape
    kv_len, num_kv_heads = key.shape[1:3]
    if page_table is not None:
        kv_len *= page_table.shape[1]
    if joined_kv:
        num_kv_heads //= 2
    is_causal = known_flag("is_causal", is_causal)
    band = Band.of(is_causal, local_window_size)
    sizes = Sizes(batch, q_len, kv_len, num_q_heads, num_kv_heads)
    given = check_arguments(
        sizes,
        bias=bias,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        positions=positions,
        sinks=sinks,
    )
    if mask is None:
        block_q, block_kv = default_blocks
        by_index = given.positions[0] is None  # with positions, the rule may allow any block
        mask = BlockMask.full(
            q_len,
            kv_len,
            block_q=block_q,
            block_kv=block_kv,
            is_causal=is_causal and by_index,
            local_window_size=local_window_size if by_index else None,
        )
    else:
        if not isinstance(mask, BlockMask):
            raise TypeError(
                f"mask must be a BlockMask or None, got {type(mask).__name__}; "
                f"xsake.BlockMask.from_blocks and xsake.patterns make one"
            )
        check_mask(mask, sizes)
    call = Call(
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=given.bias,
        q_segments=given.segments[0],
        kv_segments=given.segments[1],
        q_positions=given.positions[0],
        kv_positions=given.positions[1],
        sink_lse=given.sink_lse,
        band=band & mask.band,
        scale=head_dim**-0.5 if scale is None else _number("scale", scale),
        deterministic=_flag("deterministic", deterministic),
        soft_cap=None if logits_soft_cap is None else _number("logits_soft_cap", logits_soft_cap, positive=True),
        page_table=page_table,
        joined_kv=joined_kv,
    )
    call, (q_lengths, kv_lengths) = cut_alike(call, given.lengths)
    call = dataclasses.replace(call, sink_lse=poisoned(call.sink_lse, call.mask.incomplete_heads(), num_q_heads))
    segments = _segments((call.q_segments, call.kv_segments), q_lengths, kv_lengths, q_len, kv_len)
    return _with_padding(call, *segments)


def _with_padding(call: Call, q_segments: Array | None, kv_segments: Array | None) -> Call:
    """The call with these ids, and 0 for padding, which may hold anything: a weight of 0 times NaN would be NaN."""
    if q_segments is None or kv_segments is None:
        return call
    query, key, value = call.query, call.key, call.value
    query = jnp.where((q_segments >= 0)[:, :, None, None], query, 0)
    if call.page_table is None:  # pages are not copied: there, a backend leaves padding out
        key = jnp.where((kv_segments >= 0)[:, :, None, None], key, 0)
        value = jnp.where((kv_segments >= 0)[:, :, None, None], value, 0)
    return dataclasses.replace(call, query=query, key=key, value=value, q_segments=q_segments, kv_segments=kv_segments)


def _check_bias(bias: Any, full: tuple[Size, int, int, int]) -> Array:
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating point, got dtype {bias.dtype}")
    if bias.ndim != 4 or any(have not in (1, want) for have, want in zip(bias.shape, full, strict=True)):
        raise ValueError(
            f"bias must broadcast to [batch, heads, q_len, kv_len]={list(full)}; got shape {tuple(bias.shape)}"
        )
    return bias


def _tokens(name: str, given: Any, batch: Size, q_len: int, kv_len: int) -> tuple[Array, Array] | tuple[None, None]:
    """(i32[B, T], i32[B, S]) from one integer array for queries and keys, or from a (query, key) pair."""
    if given is None:
        return None, None
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or any(x is None for x in given):
            raise ValueError(f"{name} must be one array or a (query, key) pair; got {len(given)} entries")
        pair = tuple(given)
    elif q_len != kv_len:
        raise ValueError(
            f"one {name} array serves queries and keys of one length; {q_len=} and {kv_len=} need a (query, key) pair"
        )
    else:
        pair = (given,) * 2
    pair = tuple(x if hasattr(x, "dtype") else np.asarray(x) for x in pair)
    for x, length, whose in zip(pair, (q_len, kv_len), ("query", "key"), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got dtype {x.dtype} for the {whose}")
        if x.ndim != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
            raise ValueError(f"{name} of the {whose} must be [{batch} or 1, {length}]; got shape {tuple(x.shape)}")
    q, kv = (jnp.broadcast_to(jnp.asarray(as_int32(name, x)), (batch, x.shape[1])) for x in pair)
    return q, kv


def _lengths(name: str, given: Any, batch: Size) -> Array | None:
    if given is None:
        return None
    x = given if hasattr(given, "dtype") else np.asarray(given)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {x.dtype}")
    if x.shape != (batch,):
        raise ValueError(f"{name} must have shape ({batch},), one length per batch entry; got {tuple(x.shape)}")
    return jnp.asarray(as_int32(name, x))


def _segments(
    segments: tuple, q_lengths: Array | None, kv_lengths: Array | None, q_len: int, kv_len: int
) -> tuple[Array, Array] | tuple[None, None]:
    """Lengths and segment ids as one pair of ids. Padding becomes -1 on queries and -2 on keys: never equal."""
    if segments[0] is None and q_lengths is None and kv_lengths is None:
        return None, None

    def merge(ids: Array | None, lengths: Array | None, length: int, padding: int) -> Array:
        inside = jnp.arange(length)[None] < (length if lengths is None else lengths[:, None])
        if ids is None:
            ids = jnp.zeros((1, length), jnp.int32)
        return jnp.where(inside & (ids >= 0), ids, padding)

    batch = next(x.shape[0] for x in (*segments, q_lengths, kv_lengths) if x is not None)
    q, kv = merge(segments[0], q_lengths, q_len, -1), merge(segments[1], kv_lengths, kv_len, -2)
    return jnp.broadcast_to(q, (batch, q_len)), jnp.broadcast_to(kv, (batch, kv_len))


def _sink_lse(sinks: Any, num_q_heads: int) -> Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating point, got dtype {sinks.dtype}")
    if sinks.ndim not in (1, 2) or sinks.shape[0] != num_q_heads or 0 in sinks.shape:
        raise ValueError(
            f"sinks must be [{num_q_heads}] or [{num_q_heads}, n], a row per query head; got shape {tuple(sinks.shape)}"
        )
    sinks = sinks.astype(np.promote_types(sinks.dtype, jnp.float32)).reshape(num_q_heads, -1)
    none = (sinks == -math.inf).all(-1)  # where logsumexp has the derivative NaN
    return jnp.where(none, -math.inf, jax.nn.logsumexp(jnp.where(none[:, None], 0.0, sinks), axis=-1))[None]


def poisoned(sink_lse: Array | None, incomplete: Array | None, num_q_heads: int) -> Array | None:
    """`sink_lse`, with NaN for the heads of a mask, bool[b, h], that lack blocks."""
    if incomplete is None:
        return sink_lse
    batch, heads = incomplete.shape
    overflowed = jnp.broadcast_to(incomplete[:, :, None], (batch, heads, num_q_heads // heads))
    base = -math.inf if sink_lse is None else sink_lse
    return jnp.where(overflowed.reshape(batch, num_q_heads), math.nan, base).astype(jnp.float32)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")
    return value


def _number(name: str, value: Any, *, positive: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"{name} must be a number known while tracing, got {value!r}; fold an array into query instead"
        ) from error
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{name}={number} must be finite{' and above 0' if positive else ''}")
    return number
