"""EasyDeL's block-sparse attention operation: its classes, registry and forward methods, on XSAKE.

Every forward method runs on the platform it names and on every other: there is no fallback to dense attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import xsake
from xsake._op.shapes import Arrays
from xsake.compat.ejkernel import pair_of, sinks_of
from xsake.compat.element_mask import as_elements, mask_of
from xsake.hads.mask.band import Band

Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationMetadata:
    """Settings of every call of an operation.

    Args:
      runtime_dtype: query, key and value are cast to it, and the output has it. None keeps their own.
      softmax_scale: factor of the logits; head_dim ** -0.5 by default. An argument of the call goes before.
      blocksize_q, blocksize_k: tokens per block of the mask.
      mesh: arrays are cut over it: batch and heads, and the sequence if its axis has several devices.
      batch_axis, sequence_axis, head_axis: names of mesh axes; those that the mesh does not have are left out.
    """

    runtime_dtype: Any = None
    softmax_scale: float | None = None
    blocksize_q: int = 128
    blocksize_k: int = 128
    mesh: Any = None
    batch_axis: Axes = ("fsdp", "dp")
    sequence_axis: Axes = "sp"
    head_axis: Axes = "tp"

    def __post_init__(self) -> None:
        for name in ("blocksize_q", "blocksize_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1")

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes of "batch", "sequence" or "head" that have several devices."""
        given = getattr(self, f"{name}_axis")
        names = (given,) if isinstance(given, str) else tuple(given or ())
        return tuple(n for n in names if self.mesh is not None and self.mesh.shape.get(n, 1) > 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOutput:
    """`attention_weights` is None: no kernel keeps them."""

    attention_weights: Any = None
    attention_outputs: Any = None
    cache_view: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskInfo:
    """Masks of a call. Any object with these attributes serves."""

    attention_mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_positions: Any = None
    kv_positions: Any = None


class OperationRegistry:
    """Operations by name."""

    _registry: dict[str, type] = {}

    @classmethod
    def register(cls, implementation: type) -> type:
        """Decorates a class with `get_impl_name`."""
        names = implementation.get_impl_name()  # type: ignore[attr-defined]
        for name in (names,) if isinstance(names, str) else names:
            cls._registry[name] = implementation
        return implementation

    @classmethod
    def get(cls, name: str) -> Any:
        if name not in cls._registry:
            raise ValueError(f"operation {name!r} is unknown; it must be one of {sorted(cls._registry)}")
        return cls._registry[name]

    @classmethod
    def create(cls, name: str, metadata: OperationMetadata) -> Any:
        """The operation of this name, with `metadata`."""
        return cls.get(name)(metadata)


@OperationRegistry.register
class BlockSparseAttn:
    """Block-sparse attention for query [batch, tokens, heads, dim], key and value [batch, keys, kv heads, dim].

    >>> import jax, jax.numpy as jnp
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 100, 4, 32))
    >>> operation = OperationRegistry.create("blocksparse", OperationMetadata(runtime_dtype=jnp.bfloat16))
    >>> operation(q, k, v, causal=True).attention_outputs.shape
    (1, 100, 4, 32)
    """

    def __init__(self, metadata: OperationMetadata):
        if not isinstance(metadata, OperationMetadata):
            raise TypeError(f"metadata must be an OperationMetadata, got {type(metadata).__name__}")
        self.metadata = metadata

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "blocksparse"

    def get_impl_metadata(self) -> OperationMetadata:
        return self.metadata

    def forward_native(
        self,
        query: Arrays,
        key: Arrays,
        value: Arrays,
        softmax_aux: Arrays | None = None,
        mask_info: Any = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        causal: bool = True,
        fused_backward: bool = False,
        cache_metadata: Any = None,
        attention_mask: Arrays | None = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """Attention; `mask_info` holds segment ids, positions and an attention mask, which is honoured exactly.

        Fewer queries than keys, under a causal rule and without positions, are the last tokens of the keys: decoding.
        Arguments in `ignore` that are not None are refused by name. XSAKE chooses by itself whether to fuse the
        backward, whatever `fused_backward` is.
        """
        unknown = [name for name, given in ignore.items() if given is not None]
        if cache_metadata is not None:
            unknown.append("cache_metadata")
        if unknown:
            raise NotImplementedError(
                f"{', '.join(unknown)}: not honoured here. Where queries stand in a cache is told by the positions of "
                f"mask_info; masks by attention_mask or mask_info"
            )
        if not isinstance(fused_backward, bool):
            raise ValueError(f"{fused_backward=} must be True or False")
        meta = self.metadata
        dtype = meta.runtime_dtype
        q, k, v = (jnp.asarray(x) if dtype is None else jnp.asarray(x).astype(dtype) for x in (query, key, value))
        batch, tokens, heads, _ = q.shape
        keys, kv_heads = k.shape[1:3]
        info = MaskInfo() if mask_info is None else mask_info
        segments, positions = (
            pair_of(name, *(getattr(info, f"{side}_{name}", None) for side in ("q", "kv")), one_length=tokens == keys)
            for name in ("segment_ids", "positions")
        )
        if attention_mask is None:
            attention_mask = getattr(info, "attention_mask", None)
        elif getattr(info, "attention_mask", None) is not None:
            raise ValueError("attention_mask is given twice, by itself and in mask_info: give one of them")
        if positions is None and causal and tokens != keys:
            of_queries = jnp.arange(keys - tokens, keys, dtype=jnp.int32)
            positions = of_queries[None], jnp.arange(keys, dtype=jnp.int32)[None]
        sizes = dict(block_q=meta.blocksize_q, block_kv=meta.blocksize_k, q_len=tokens, kv_len=keys)
        elements = None if attention_mask is None else as_elements(attention_mask, batch, heads, sizes)
        band = Band.of(bool(causal), sliding_window)
        mask = mask_of(sizes, batch, elements=elements, band=band if positions is None else Band())
        options: dict[str, Any] = dict(
            scale=meta.softmax_scale if softmax_scale is None else softmax_scale,
            is_causal=bool(causal),
            local_window_size=sliding_window,
            segment_ids=segments,
            positions=positions,
            sinks=sinks_of(softmax_aux, heads, kv_heads),
            logits_soft_cap=logits_soft_cap,
        )
        return AttentionOutput(attention_outputs=_over_mesh(meta, q, k, v, mask, options))

    def __call__(self, query: Any, key: Any, value: Any, **arguments: Any) -> AttentionOutput:
        """The forward method of the platform that JAX runs on."""
        platform = jax.default_backend()
        forward: Callable = getattr(self, f"forward_{platform}", self.forward_native)
        return forward(query, key, value, **arguments)

    def _forward(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        return self.forward_native(*args, **kwargs)

    forward_cpu = forward_gpu = forward_cuda = forward_rocm = forward_tpu = _forward


def _over_mesh(meta: OperationMetadata, q: Array, k: Array, v: Array, mask: Any, options: dict[str, Any]) -> Array:
    if meta.mesh is None:
        return xsake.attention(q, k, v, mask, **options)
    batch, sequence, heads = (meta.axes(name) or None for name in ("batch", "sequence", "head"))
    sizes = [int(np.prod([meta.mesh.shape[n] for n in names or ()])) for names in (batch, sequence, heads)]
    for what, size, given in (("batch", sizes[0], q.shape[0]), ("heads", sizes[2], q.shape[2])):
        if given % size:
            raise ValueError(f"query has {what} {given}, which the mesh cannot cut into {size} equal parts")
    if sequence is not None and q.shape[1] > 1:
        kv_heads = heads if k.shape[2] % sizes[2] == 0 else None
        if kv_heads is None and heads is not None:
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return xsake.sharded_attention(
            q, k, v, mask, mesh=meta.mesh, batch=batch, sequence=sequence, heads=heads, **options
        )
    spec = NamedSharding(meta.mesh, PartitionSpec(batch, None, heads))
    of_keys = spec if k.shape[2] % sizes[2] == 0 else NamedSharding(meta.mesh, PartitionSpec(batch))

    def placed(x: Array, where: NamedSharding) -> Array:
        return jax.lax.with_sharding_constraint(x, where)

    def run(q: Array, k: Array, v: Array) -> Array:
        out = xsake.attention(placed(q, spec), placed(k, of_keys), placed(v, of_keys), mask, **options)
        return placed(out, spec)

    return jax.jit(run)(q, k, v)
