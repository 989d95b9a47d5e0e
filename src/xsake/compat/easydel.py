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


def register(name: str = "blocksparse") -> type:
    """Enter xsake in EasyDeL's own `OperationRegistry`: models with `attn_mechanism=name` then attend by xsake.

    It takes the place of the operation that EasyDeL has under this name, and needs EasyDeL installed. Requirements,
    caches and modes are those of EasyDeL's block-sparse operation. Meshes, `mask_info`, biases, windows, sinks and soft
    caps are honoured, with the meaning that EasyDeL's "vanilla" gives them. Dropout of weights, `cum_seqlens_*`,
    `normalize_output=False`, windows over a cache and unknown arguments are refused by name.
    """
    try:
        from easydel.operations import AttentionOutput as Output
        from easydel.operations import OperationRegistry as Registry
        from easydel.operations.kernels.blocksparse_attention import BlockSparseAttn as Theirs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "easydel":
            raise
        raise ModuleNotFoundError(
            "EasyDeL, in which register() enters xsake, is not installed: see the page 'Coming from another library'",
            name="easydel",
        ) from error

    class OnXsake(Theirs):
        @classmethod
        def get_impl_name(cls) -> str:
            return name

        def forward_native(self, query: Any, key: Any, value: Any, **given: Any) -> Any:
            return Output(
                attention_weights=None, attention_outputs=_as_vanilla(self.metadata, query, key, value, **given)
            )

    return Registry.register(OnXsake)


# Arguments of EasyDeL's other kernels, and of caches, whose keys and values and masks the call has.
_CHANGE_NO_NUMBER = {
    *("cache_metadata", "cache_view", "compute_dtype", "dropout_rng", "fused_backward", "mask_value", "optimized"),
    *("policy", "precision", "prevent_cse", "vmem_limit_bytes"),
}


def _as_vanilla(
    metadata: Any,
    query: Array,
    key: Array,
    value: Array,
    *,
    softmax_aux: Any = None,
    mask_info: Any = None,
    bias: Any = None,
    init_bias: Callable | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    sliding_window: Any = None,
    causal: bool = True,
    deterministic: bool = True,
    dropout_prob: float = 0.0,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    normalize_output: bool = True,
    **of_other_kernels: Any,
) -> Array:
    """The output that EasyDeL's "vanilla" gives."""
    refused = dict(cum_seqlens_q=cum_seqlens_q is not None, cum_seqlens_k=cum_seqlens_k is not None)
    refused |= dict(dropout_prob=bool(dropout_prob) and not deterministic, normalize_output=not normalize_output)
    refused |= {x: value is not None for x, value in of_other_kernels.items() if x not in _CHANGE_NO_NUMBER}
    if any(refused.values()):
        raise NotImplementedError(f"{', '.join(name for name, is_given in refused.items() if is_given)}: not honoured")
    q, k, v = (x.astype(metadata.runtime_dtype) for x in (query, key, value))
    batch, tokens, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    if mask_info is None and bias is None and init_bias is not None:
        bias = init_bias()
    if tokens == 1:
        causal = False  # decoding: the mask says which keys of the cache are filled
    window = sliding_window
    if window is not None and tokens != keys:  # vanilla counts both from 0, whatever the place of the queries
        if any(side is not None and side < keys - 1 for side in Band.of(False, window)):
            raise NotImplementedError(
                f"sliding_window={window} for {tokens} queries and {keys} keys, whose distances are not told"
            )
        window = None
    segments, elements = None, None
    if mask_info is not None and bias is None:  # a bias goes before the mask
        # The properties of the same names compute the one from the other.
        allowed, of_queries, of_keys = (
            getattr(mask_info, f"_{name}") for name in ("attention_mask", "q_segment_ids", "kv_segment_ids")
        )
        if allowed is None:
            segments = (of_queries, of_keys)
        elif tokens == 1 and allowed.ndim == 4 and allowed.shape[1] == 1:
            allowed = jnp.broadcast_to(allowed[:, 0, :1, :keys] != 0, (batch, 1, keys))
            segments = jnp.zeros((batch, 1), jnp.int32), jnp.where(allowed[:, 0], 0, -1)
        else:
            elements = allowed[..., :tokens, :keys] if allowed.ndim == 4 else allowed
    if np.shape(softmax_aux) in ((heads,), (kv_heads,)):  # here, one sink per head
        softmax_aux = softmax_aux[:, None]
    blocks = OperationMetadata(mesh=metadata.mesh)
    sizes = dict(block_q=blocks.blocksize_q, block_kv=blocks.blocksize_k, q_len=tokens, kv_len=keys)
    elements = None if elements is None else as_elements(elements, batch, heads, sizes)
    options: dict[str, Any] = dict(
        bias=bias,
        scale=softmax_scale,
        is_causal=causal,
        local_window_size=window,
        segment_ids=segments,
        sinks=sinks_of(softmax_aux, heads, kv_heads),
        logits_soft_cap=logits_soft_cap,
    )
    mask = mask_of(sizes, batch, elements=elements, band=Band.of(causal, window))
    return _over_mesh(blocks, q, k, v, mask, options)
