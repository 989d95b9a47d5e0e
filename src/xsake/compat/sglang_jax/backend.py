"""XsakeAttention: what the engine calls in every layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from sgl_jax.srt.layers.attention.native_backend import NativeAttention
from sgl_jax.srt.utils.jax_utils import device_array

import xsake
from xsake.compat.sglang_jax.requests import Counts
from xsake.compat.sglang_jax.settings import Settings
from xsake.hads.attention import ragged

_HEADS = PartitionSpec("data", "tensor")  # tokens are not split: there is one rank of data
_POOL = PartitionSpec("data", None, "tensor")
_NUMBERS = PartitionSpec("data")


class XsakeAttention(NativeAttention):
    """The engine's own dense backend writes keys and values to its pool; the attention is `xsake.ragged_attention`."""

    page_size: int
    pages: int
    settings: Settings

    @classmethod
    def of(cls, runner: Any, settings: Settings) -> XsakeAttention:
        backend = cls(runner.num_attn_heads, runner.num_kv_heads, runner.mesh)
        backend.page_size, backend.settings = runner.page_size, settings
        backend.pages = -(-runner.model_config.context_len // runner.page_size)  # of a request, at most
        backend.forward_metadata = nnx.data(Counts())
        return backend

    def get_forward_metadata(self, batch: Any) -> Counts:
        """Host work before a batch: none, but for prompts that HADS reads."""
        found = Counts.of(batch, self.settings, page_size=self.page_size, pages=self.pages)
        return device_array(found, sharding=NamedSharding(self.mesh, _NUMBERS)) if found.counts is not None else found

    def __call__(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, token_to_kv_pool: Any, **named: Any
    ) -> tuple[Array, Array]:
        """(output [T, H D], the layer's pool with the new tokens)"""
        unknown = [name for name, x in named.items() if x is not None and name not in ("attention_sink", "causal")]
        if unknown or named.get("causal") not in (None, 1, True):
            raise NotImplementedError(f"xsake does not know {', '.join(unknown) or 'causal=0'} of this model's layers")
        pool = self._get_and_update_kv_cache(k, v, forward_batch, token_to_kv_pool, layer.layer_id)[2]
        sinks = named.get("attention_sink")
        sinks = getattr(sinks, "value", sinks)
        decoding = forward_batch.forward_mode.is_decode()
        attend = partial(
            _attend,
            page_size=self.page_size,
            pages=self.pages,
            profile=None if decoding else self.settings.profile,
            layer=layer.layer_id,
            scale=layer.scaling,
            local_window_size=None if layer.sliding_window_size is None else (layer.sliding_window_size - 1, 0),
            logits_soft_cap=layer.logit_cap,
            most_queries=1 if decoding else None,
            implementation=self.settings.implementation,
        )
        lengths = forward_batch.seq_lens
        new = (lengths > 0).astype(jnp.int32) if decoding else forward_batch.extend_seq_lens
        query = q.reshape(q.shape[0], -1, layer.head_dim)
        counts = Counts() if decoding else self.forward_metadata
        arrays = (query, pool, new, lengths, forward_batch.cache_loc, sinks, counts)
        where = (_HEADS, _POOL, _NUMBERS, _NUMBERS, _NUMBERS, PartitionSpec("tensor"), _NUMBERS)
        out = jax.shard_map(attend, mesh=self.mesh, in_specs=where, out_specs=_HEADS, check_vma=False)(*arrays)
        return out.reshape(q.shape[0], -1), pool


def _attend(
    query: Array,
    pool: Array,
    new: Array,
    lengths: Array,
    slots: Array,
    sinks: Array | None,
    counts: Counts,
    *,
    page_size: int,
    pages: int,
    profile: Any,
    layer: int,
    **options: Any,
) -> Array:
    """`slots` are those of all requests, each from a page's beginning on, one request after the other."""
    cu_seqlens = _sums(new)
    if counts.counts is not None:
        own: dict[str, Any] = dict(page_table=counts.page_table, counts=counts.counts, lengths=counts.lengths)
        given: dict[str, Any] = dict(query=query, pages=pool, cu_seqlens=cu_seqlens, kv_lengths=lengths, sinks=sinks)
        return ragged.attend(profile, layer, **given, **own, **options)
    first = _sums(-(-lengths // page_size))[:-1]
    place = (first[:, None] + jnp.arange(pages, dtype=jnp.int32)[None]) * page_size
    table = slots[jnp.minimum(place, slots.shape[0] - 1)] // page_size
    return xsake.ragged_attention(query, pool, cu_seqlens, lengths, table, sinks=sinks, **options)


def _sums(x: Array) -> Array:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
