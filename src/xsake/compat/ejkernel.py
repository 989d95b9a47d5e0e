"""ejkernel's block-sparse and native sparse attention: its names, signatures and layouts, on XSAKE.

Change the import, and keep the call. Every argument is honoured or refused by name. Differences from ejkernel's
results are on the page "Coming from another library".
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import xsake
from xsake._ground.device import on_host, platform_of
from xsake._op.shapes import Arrays
from xsake.compat.element_mask import as_elements, mask_of
from xsake.compat.tiles import BwdParams, FwdParams, Tiles
from xsake.hads.mask.band import Band


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseMask:
    """Which blocks of keys a block of queries attends to: those of [lower_bounds, upper_bounds), i32[batch, 1, blocks].

    The bounds of fully attended blocks are found anew and may be left out.
    """

    lower_bounds: Any
    upper_bounds: Any
    lower_full_bounds: Any = None
    upper_full_bounds: Any = None


def blocksparse_attention(
    query: Arrays,
    key: Arrays,
    value: Arrays,
    q_segment_ids: Arrays | None = None,
    kv_segment_ids: Arrays | None = None,
    q_positions: Arrays | None = None,
    kv_positions: Arrays | None = None,
    softmax_aux: Arrays | None = None,
    bias: Arrays | None = None,
    attention_mask: Arrays | None = None,
    sequence_parallelism_mesh_axis_name: str | None = None,
    logits_soft_cap: float | None = None,
    qkv_layouts: tuple[SparseMask, ...] | None = None,
    softmax_scale: float | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    mask_builder: Callable | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    causal: bool = True,
    fused_backward: bool = False,
) -> Array:
    """Block-sparse attention for query [batch, heads, tokens, dim], key and value [batch, kv heads, keys, dim].

    An element attends iff all that is given allows it: causal, window, segments, attention mask, layouts, builder.

    Args:
      q_segment_ids, kv_segment_ids: i32[batch, tokens]; only equal ids attend, and a negative id is padding.
      q_positions, kv_positions: i32[batch, tokens]; causality and the window use them instead of indices.
      softmax_aux: logits of sinks, [sinks] for all heads alike, or [heads or kv heads, sinks].
      bias: broadcasts to [batch, heads, tokens, keys].
      attention_mask: boolean or integer, broadcasts to [batch, heads, tokens, keys], or [batch, tokens, keys].
      sequence_parallelism_mesh_axis_name: inside `jax.shard_map`, the mesh axis that cuts the queries' sequence. Key
        and value are the whole sequence, or cut in the same way; then they are gathered.
      qkv_layouts: the first `SparseMask` says which blocks attend, of 64 tokens unless tiles are given; gradients use
        its exact transpose.
      fwd_params, bwd_params: tiles. On a GPU they are tiles, warps and stages of the Triton kernels, which then run.
      mask_builder: called with (tokens, keys, heads, head, group size), it gives a mask of that head which can be
        indexed by slices, as those of splash attention; called with nothing, it gives a `SparseMask`.
      chunk_size: tokens per block, of queries and of keys, instead of those of `fwd_params`.
      fused_backward: dQ, dK and dV in one pass. XSAKE chooses by itself; True is refused where no kernel does it.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", None) != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, dim]; got shape {np.shape(x)}")
    q, k, v = (jnp.asarray(x).swapaxes(1, 2) for x in (query, key, value))
    batch, heads, group = q.shape[0], q.shape[2], q.shape[2] // max(k.shape[2], 1)
    segments = pair_of("segment_ids", q_segment_ids, kv_segment_ids, one_length=q.shape[1] == k.shape[1])
    positions = _positions(q_positions, kv_positions, q, k)
    if sequence_parallelism_mesh_axis_name is not None:
        k, v, segments, positions = _of_shard(sequence_parallelism_mesh_axis_name, q, k, v, segments, positions)
    tiles = Tiles.of(fwd_params, bwd_params, chunk_size, platform_of(q), fused_backward)
    of_heads, layout = _built(mask_builder, (q.shape[1], k.shape[1]), heads, group)
    sizes = tiles.sizes(q.shape[1], k.shape[1], 128 if qkv_layouts is None and layout is None else 64)
    band = Band.of(bool(causal), sliding_window)
    elements = None if attention_mask is None else as_elements(attention_mask, batch, heads, sizes)
    if qkv_layouts is not None:
        if layout is not None:
            raise ValueError("qkv_layouts and a mask_builder that gives a SparseMask say the same: give one of them")
        layout = qkv_layouts[0] if isinstance(qkv_layouts, (tuple, list)) else qkv_layouts
    blocks = None if layout is None else _blocks(layout, batch, sizes)
    mask = mask_of(
        sizes,
        batch,
        elements=elements,
        of_heads=of_heads,
        blocks=blocks,
        band=band if positions is None else Band(),
    )
    out = xsake.attention(
        q,
        k,
        v,
        mask,
        bias=bias,
        scale=softmax_scale,
        is_causal=bool(causal),
        local_window_size=sliding_window,
        segment_ids=segments,
        positions=positions,
        sinks=sinks_of(softmax_aux, heads, k.shape[2]),
        logits_soft_cap=logits_soft_cap,
        implementation=tiles.implementation,
        config=tiles.config(),
    )
    return out.swapaxes(1, 2)


def native_sparse_attention(
    query: Arrays,
    key: Arrays,
    value: Arrays,
    g_cmp: Arrays | None = None,
    g_slc: Arrays | None = None,
    block_indices: Arrays | None = None,
    block_counts: int | Arrays = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: Arrays | None = None,
) -> Array:
    """`g_slc * selected + g_cmp * compressed` for query [batch, tokens, heads, dim]; the gates are [batch, tokens,
    heads], or per channel [batch, tokens, heads * dim].

    With `g_cmp`, blocks are chosen by their weights in the compressed attention, `block_counts` per token, the own
    block among them; `block_indices` is then not used, as ejkernel documents, with a warning. Without `g_cmp`,
    `block_indices` is [batch, tokens, kv heads, blocks], or [batch, kv heads, query blocks, blocks].
    """
    if g_cmp is None:
        if block_indices is None:
            raise ValueError("give g_cmp, by which blocks are chosen, or block_indices")
        out = apply_native_sparse_attention(
            query, key, value, block_indices, block_counts, block_size, softmax_scale, cu_seqlens
        )
        return out if g_slc is None else (out * _gate("g_slc", g_slc, query, value)).astype(out.dtype)
    if block_indices is not None:
        warnings.warn("block_indices is not used when g_cmp is given: blocks are chosen by weight", stacklevel=2)
    if isinstance(block_counts, jax.core.Tracer):
        raise ValueError(
            "block_counts must be known while tracing when blocks are chosen by weight: give an int, or an array that "
            "is no argument of the traced function"
        )
    most = max(int(np.max(on_host(block_counts))), 1)
    gates = [None if g is None else _gate(name, g, query, value) for name, g in (("g_cmp", g_cmp), ("g_slc", g_slc))]
    return xsake.native_sparse_attention(
        query,
        key,
        value,
        gate_compressed=gates[0],
        gate_selected=gates[1],
        block_size=block_size,
        num_selected=most,
        block_counts=None if np.ndim(block_counts) == 0 else block_counts,
        cu_seqlens=cu_seqlens,
        keep_first=False,
        scale=softmax_scale,
    )


def apply_native_sparse_attention(
    query: Arrays,
    key: Arrays,
    value: Arrays,
    block_indices: Arrays,
    block_counts: int | Arrays = 16,
    block_size: int = 64,
    softmax_scale: float | None = None,
    cu_seqlens: Arrays | None = None,
    token_indices: Arrays | None = None,
) -> Array:
    """Causal attention to chosen blocks.

    `block_indices` are [batch, tokens, kv heads, blocks] with the counts [batch, tokens, kv heads], or [batch, kv
    heads, query blocks, blocks] with the counts [batch, kv heads, query blocks]; a count may be an int. -1 is no block.
    """
    if token_indices is not None:
        raise NotImplementedError("token_indices follow from cu_seqlens: leave them out")
    indices = jnp.asarray(block_indices)
    tokens, kv_heads = query.shape[1], key.shape[2]
    rows = -(-tokens // block_size)
    if indices.ndim == 4 and indices.shape[1:3] != (tokens, kv_heads) and indices.shape[1:3] == (kv_heads, rows):
        # The rows of a token's block are those of the token.
        row = np.arange(tokens) // block_size
        indices = indices[:, :, row].swapaxes(1, 2)
        if np.ndim(block_counts):
            block_counts = jnp.asarray(block_counts)[:, :, row].swapaxes(1, 2)
        if cu_seqlens is not None:
            raise NotImplementedError("cu_seqlens needs block_indices of tokens, [batch, tokens, kv heads, blocks]")
    return xsake.selected_attention(
        query,
        key,
        value,
        indices,
        block_counts,
        block_size=block_size,
        scale=softmax_scale,
        cu_seqlens=cu_seqlens,
    )


# -- arguments ---------------------------------------------------------------------------------------------------------


def sinks_of(softmax_aux: Any, heads: int, kv_heads: int) -> Array | None:
    """[H, sinks]: one-dimensional logits are sinks of all heads, whatever their number."""
    if softmax_aux is None:
        return None
    aux = jnp.asarray(softmax_aux)
    if aux.ndim == 1:
        return jnp.broadcast_to(aux[None], (heads, aux.shape[0]))
    if aux.ndim != 2 or aux.shape[0] not in (heads, kv_heads):
        raise ValueError(
            f"softmax_aux must be [sinks], or [{heads}, sinks] or [{kv_heads}, sinks]; got shape {tuple(aux.shape)}"
        )
    return jnp.repeat(aux, heads // aux.shape[0], axis=0)


def pair_of(name: str, of_queries: Any, of_keys: Any, *, one_length: bool) -> tuple[Array, Array] | None:
    """(query, key) arrays, or None for neither. One array alone is that of both, if queries and keys have `one_length`.

    Raises ValueError where they have not.
    """
    given = [jnp.asarray(x) for x in (of_queries, of_keys) if x is not None]
    if len(given) == 1 and not one_length:
        raise ValueError(f"q_{name} and kv_{name} go together where queries and keys differ in number; got one")
    return (given[0], given[-1]) if given else None


def _positions(of_queries: Any, of_keys: Any, q: Array, k: Array) -> tuple[Array, Array] | None:
    """(query, key) positions, or None for neither. Positions that are missing are indices."""
    if of_queries is None and of_keys is None:
        return None
    of_queries, of_keys = (
        _indices(like) if x is None else jnp.asarray(x) for x, like in ((of_queries, q), (of_keys, k))
    )
    return of_queries, of_keys


def _indices(x: Array, first: Any = 0) -> Array:
    """i32[batch, tokens]: first, first + 1, ..."""
    return jnp.broadcast_to((first + jnp.arange(x.shape[1], dtype=jnp.int32))[None], x.shape[:2])


def _of_shard(axis: str, q: Array, k: Array, v: Array, segments: Any, positions: Any) -> tuple:
    """The shard's call: whole keys, and positions that count from the beginning of the sequence."""
    try:
        own, shards = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"sequence_parallelism_mesh_axis_name={axis!r} is no axis here: call inside jax.shard_map over a mesh with "
            f"this axis, or use xsake.sharded_attention"
        ) from error
    tokens, keys = q.shape[1], k.shape[1]

    def whole(x: Array) -> Array:
        return jax.lax.all_gather(x, axis, axis=1, tiled=True)

    if keys == tokens:
        k, v = whole(k), whole(v)
        segments = None if segments is None else (segments[0], whole(segments[1]))
        positions = None if positions is None else (positions[0], whole(positions[1]))
    elif keys != tokens * shards:
        raise ValueError(
            f"with {shards} shards of {tokens} queries, key must have {tokens} tokens (its shard) or {tokens * shards} "
            f"(all); got {keys}"
        )
    if positions is None:
        positions = _indices(q, own * tokens), _indices(k)
    return k, v, segments, positions


def _built(builder: Callable | None, shape: tuple[int, int], heads: int, group: int) -> tuple[list | None, Any]:
    """(masks of heads, SparseMask): one of them, or neither."""
    if builder is None:
        return None, None
    if not callable(builder):
        raise TypeError(f"mask_builder must be callable, got {type(builder).__name__}")
    try:
        inspect.signature(builder).bind(*shape, heads, 0, group)
    except TypeError:
        return None, builder()
    return [builder(*shape, heads, head, group) for head in range(heads)], None


def _blocks(layout: Any, batch: int, sizes: dict[str, int]) -> Any:
    """bool[batch | 1, heads | 1, nQ, nK] from the intervals of a SparseMask."""
    lower, upper = (getattr(layout, name, None) for name in ("lower_bounds", "upper_bounds"))
    if lower is None or upper is None:
        raise ValueError("qkv_layouts must hold a SparseMask with lower_bounds and upper_bounds")
    traced = any(isinstance(x, jax.core.Tracer) for x in (lower, upper))
    lower, upper = (jnp.asarray(x) if traced else on_host(x) for x in (lower, upper))
    rows, columns = (-(-sizes[f"{side}_len"] // sizes[f"block_{side}"]) for side in ("q", "kv"))
    if lower.shape != upper.shape or lower.ndim != 3 or lower.shape[0] not in (1, batch) or lower.shape[2] != rows:
        raise ValueError(
            f"the bounds of a SparseMask must be [{batch}, 1, {rows}] for blocks of {sizes['block_q']} x "
            f"{sizes['block_kv']} tokens; got {tuple(lower.shape)} and {tuple(upper.shape)}"
        )
    column = np.arange(columns)[None, None, None]
    return (column >= lower[..., None]) & (column < upper[..., None])


def _gate(name: str, gate: Any, query: Any, value: Any) -> Array:
    """[B, T, H, 1 or channels]."""
    gate = jnp.asarray(gate)
    batch, tokens, heads = query.shape[:3]
    channels = heads * value.shape[3]
    if gate.shape == (batch, tokens, heads):
        return gate[..., None]
    if gate.shape == (batch, tokens, channels):
        return gate.reshape(batch, tokens, heads, -1)
    raise ValueError(
        f"{name} must be [batch, tokens, heads]={[batch, tokens, heads]}, or have heads * dim={channels} channels; got "
        f"shape {tuple(gate.shape)}"
    )
