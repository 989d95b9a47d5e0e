"""How the layers of one forward attend: with which mask, to which keys, on which devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

import xsake
from xsake import BlockMask
from xsake.hads.mask.row_shards import RowShards
from xsake.model.network.cache import KVCache
from xsake.model.network.sequence_cut import SequenceCut

MaskFn = Callable[[int, Array, Array], BlockMask | RowShards | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attend:
    """Causal attention, by a function that takes the arguments of `xsake.attention`.

    The function gets only the arguments that a call needs, so that `jax.nn.dot_product_attention` works too where there
    is no mask, no filled cache and no segment. `attention` in its place is also told the layer's number.
    """

    attention_fn: Callable[..., Any]
    attention: Callable[..., Any] | None = None
    mask_fn: MaskFn | None = None
    segment_ids: Any = None
    slot_positions: Any = None  # of a filled cache
    mesh: Mesh | None = None
    cut: SequenceCut | None = None
    window_of: Callable[[int], int | None] = lambda layer: None

    def __post_init__(self) -> None:
        if self.attention is not None and (self.mask_fn is not None or self.mesh is not None):
            raise ValueError("attention chooses its own blocks, on one device: leave out mask_fn and mesh")
        if self.cut is not None and self.attention_fn is not xsake.attention:
            raise ValueError(
                f"the mesh cuts sequences over {self.cut.shards} devices, which xsake.attention can serve, and this "
                f"model's attention_fn is {self.attention_fn!r}"
            )

    def __call__(
        self, layer: int, cache: KVCache | None, query: Array, key: Array, value: Array
    ) -> tuple[Array, KVCache | None]:
        options: dict[str, Any] = {}
        window = self.window_of(layer)
        if cache is not None:
            cache = cache.write(layer, key, value)
            if cache.filled:
                key, value, places = cache.keys[layer], cache.values[layer], self.slot_positions
                if window is not None and self.mask_fn is None and self.mesh is None:
                    key, value, places = cache.window(layer, query.shape[1], window)
                options["positions"] = (cache.slots(query.shape[1]), places)
        static: dict[str, Any] = dict(is_causal=True)
        if window is not None:
            static["local_window_size"] = (window - 1, 0)
        if self.segment_ids is not None:
            options["segment_ids"] = self.segment_ids
        mask = self._mask(layer, query, key)
        if mask is not None:
            if "positions" in options and isinstance(mask, BlockMask) and mask.is_causal:
                raise ValueError(
                    f"layer {layer}'s mask counts causality from query 0, but these {query.shape[1]} queries follow "
                    "the tokens of a filled cache; build the mask with is_causal=False: the model is causal by position"
                )
            options["mask"] = mask
        if self.attention is not None:
            out = self.attention(query, key, value, layer=layer, **static, **options)
        elif self.cut is not None:
            out = self.cut.attend(query, key, value, static | options)
        elif self.mesh is None:
            out = self.attention_fn(query, key, value, **static, **options)
        else:
            out = self._sharded(self.mesh, query, key, value, static, options)
        return out, cache

    def _mask(self, layer: int, query: Array, key: Array) -> BlockMask | RowShards | None:
        """The layer's mask, chosen from queries and keys in the order of the sequence, however they lie."""
        if self.mask_fn is None:
            return None
        if self.cut is not None:
            query, key = self.cut.natural(query), self.cut.natural(key)
        return self.mask_fn(layer, query, key)

    def _sharded(
        self, mesh: Mesh, query: Array, key: Array, value: Array, static: dict[str, Any], options: dict[str, Any]
    ) -> Array:
        """Each device attends for its sequences (axis "data") and its heads (axis "model"), with no communication."""
        data, model = (name if name in mesh.axis_names else None for name in ("data", "model"))
        for axis, size, what in ((data, query.shape[0], "sequences"), (model, key.shape[2], "KV heads")):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(f"{size} {what} cannot be divided over the mesh's {axis}={mesh.shape[axis]}")
        heads, tokens = PartitionSpec(data, None, model, None), PartitionSpec(data, None)
        specs = {
            name: x.partition_spec(data, model) if name == "mask" else jax.tree.map(lambda _: tokens, x)
            for name, x in options.items()
        }
        return jax.shard_map(
            lambda q, k, v, options: self.attention_fn(q, k, v, **static, **options),
            mesh=mesh,
            in_specs=(heads, heads, heads, specs),
            out_specs=heads,
        )(query, key, value, options)
