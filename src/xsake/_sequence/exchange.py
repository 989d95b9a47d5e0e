"""Attention of one shard's queries to the keys of all shards: how keys and values reach the queries.

- gather: keys and values of all shards are gathered, a few heads at a time, so that what is gathered is about as large
  as a shard's own. The gradients go back by a reduce-scatter.
- sparse: only blocks that are listed travel (`exchange_sparse`).
- ring: the shards pass keys and values on, n - 1 times, each while the attention to the keys it holds is computed; the
  outputs are merged by their lse in float32. In the backward the gradients travel along, one step further, to the shard
  whose keys they belong to.

All keep a shard's own arrays for the backward and nothing that travelled. Gather and ring move (n-1)/n of keys and
values.
"""

from __future__ import annotations

import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from xsake._ground.trace import vary, varying_axes
from xsake._op.derivatives import reverse_mode_only
from xsake._op.run import Runner
from xsake._rewrites import rewrite
from xsake._rewrites.head_pieces import HeadPieces, wide
from xsake._sequence.exchange_sparse import Sparse
from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts, of_live_rows, sink_gradient
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.shard_masks import mask_of_all_keys, masks_of_hops

EXCHANGES = ("gather", "ring", "sparse")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Shard:
    """The arrays of one shard. `call` has its own queries and keys; arrays along the keys cover all shards' keys.

    `rows` are the shard's own, and `bias` is [.., .., own queries, all keys]. `by_blocks`: the causal rule is all there
    is to test. Then blocks of other shards' keys are full or not listed, and the own keys stand as the own queries do.
    """

    call: Any  # Call; JAX also builds trees of flags and of cotangents from this class
    rows: Any  # RowShards
    bias: Any
    kv_segments: Any
    kv_positions: Any
    by_blocks: bool = dataclasses.field(default=False, metadata={"static": True})

    def of_all_keys(self, shard: Array, *, transpose: bool) -> Call:
        """The call of this shard's queries to all keys, with the own keys and values."""
        return dataclasses.replace(
            self.call,
            mask=mask_of_all_keys(self.rows, shard, transpose=transpose),
            bias=self.bias,
            kv_segments=self.kv_segments,
            kv_positions=self.kv_positions,
            sink_lse=None,
        )

    def of_hop(self, hop: int, key: Array, value: Array, holder: Array, mask: BlockMask) -> Call:
        """The call of this shard's queries to the keys of shard `holder`, which arrive in this hop."""
        size = key.shape[1]

        def cut(x: Array | None, axis: int) -> Array | None:
            if x is None or x.shape[axis] == 1:
                return x
            return jax.lax.dynamic_slice_in_dim(x, holder * size, size, axis)

        call = dataclasses.replace(
            self.call,
            key=key,
            value=value,
            mask=mask,
            bias=cut(self.bias, 3),
            kv_segments=cut(self.kv_segments, 1),
            kv_positions=cut(self.kv_positions, 1),
            sink_lse=None,
        )
        if not self.by_blocks:
            return call
        return dataclasses.replace(call, q_positions=None, kv_positions=None, band=call.band if hop == 0 else Band())


class Route(NamedTuple):
    """How keys reach queries, by `exchange`, over the mesh axes of the sequence."""

    runner: Runner
    exchange: str
    axes: str | tuple[str, ...]
    shards: int
    capacity: int = 0  # of the sparse exchange

    @property
    def sparse(self) -> Sparse:
        return Sparse(self.runner, self.axes, self.shards, self.capacity)

    def in_pieces(self, call: Call) -> HeadPieces | None:
        """As many pieces of the K/V heads as there are shards, or the next fewer that come out even."""
        pieces = next(n for n in range(min(self.shards, call.kv_heads), 0, -1) if call.kv_heads % n == 0)
        return HeadPieces(call, pieces) if pieces > 1 else None

    def forward(self, shard: Shard) -> tuple[Array, Array]:
        shard = vary(reverse_mode_only(shard), varying_axes(shard))
        return _exchanged(self, shard)

    def next(self, tree: Any) -> Any:
        return jax.lax.ppermute(tree, self.axes, [(i, (i + 1) % self.shards) for i in range(self.shards)])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(route: Route, shard: Shard) -> tuple[Array, Array]:
    if route.exchange == "sparse":
        out, lse = route.sparse.forward(shard)
    else:
        out, lse = (_gather if route.exchange == "gather" else _ring)(route, shard)
    return _with_sink(shard.call, out, lse)


def _with_sink(call: Call, out: Array, lse: Array) -> tuple[Array, Array]:
    if call.sink_lse is not None:
        without, lse = lse, jnp.logaddexp(lse, call.sink_lse[:, :, None])
        kept = jnp.where(without == -jnp.inf, 0.0, jnp.exp(without - lse))
        kept = jnp.where(jnp.isnan(lse), lse, kept)  # an overflowed mask
        out = wide(out) * kept.swapaxes(1, 2)[..., None]
    return out.astype(call.query.dtype), lse


def _exchanged_fwd(route: Route, primals: Any) -> tuple:
    shard: Shard = jax.tree.map(lambda p: p.value, primals)
    out, lse = _exchanged(route, shard)
    return (out, lse), (shard, out, lse, _Wanted(shard.bias is not None and primals.bias.perturbed))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    bias: bool


def _exchanged_bwd(route: Route, residuals: tuple, cotangents: tuple) -> tuple[Shard]:
    shard, out, lse, wanted = residuals
    axes = varying_axes(shard)
    d_out, d_lse = (vary(jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c, axes) for c in cotangents)
    delta = DeltaParts(out, d_lse).summed(lse, d_out)
    live = of_live_rows(shard.call.q_segments, lse, delta)
    if route.exchange == "sparse":
        query, key, value, *bias = route.sparse.backward(shard, wanted.bias, lse, live, d_out)
    else:
        backward = _gather_backward if route.exchange == "gather" else _ring_backward
        query, key, value, *bias = backward(route, shard, wanted.bias, lse, live, d_out)
    call = dataclasses.replace(jax.tree.map(lambda _: None, shard.call), query=query, key=key, value=value)
    if shard.call.sink_lse is not None:
        call = dataclasses.replace(call, sink_lse=sink_gradient(shard.call.sink_lse, lse, delta))
    zeros = jax.tree.map(lambda _: None, shard)
    return (dataclasses.replace(zeros, call=call, bias=bias[0] if bias else None),)


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd, symbolic_zeros=True)


# -- gather ----------------------------------------------------------------------------------------------------------


def _gather(route: Route, shard: Shard) -> tuple[Array, Array]:
    own = jax.lax.axis_index(route.axes)
    call = shard.of_all_keys(own, transpose=False)

    def run(call: Call) -> tuple:
        return route.runner.run_forward(_gathered(route, call))

    out, lse = rewrite.forward((route.in_pieces,), call, run)
    return out, route.runner.contract_lse(lse)


def _gather_backward(route: Route, shard: Shard, with_bias: bool, lse: Array, delta: Array, d_out: Array) -> tuple:
    own = jax.lax.axis_index(route.axes)
    call = shard.of_all_keys(own, transpose=True)

    def run(call: Call, *given: Array) -> tuple:
        query, key, value, *bias = route.runner.run_backward(with_bias, _gathered(route, call), *given)
        return query, scattered(key), scattered(value), *bias

    def scattered(x: Array) -> Array:
        total = jax.lax.psum_scatter(wide(x), route.axes, scatter_dimension=1, tiled=True)
        return total.astype(x.dtype)

    return rewrite.backward((route.in_pieces,), call, (lse, delta, d_out), run)


def _gathered(route: Route, call: Call) -> Call:
    key, value = (jax.lax.all_gather(x, route.axes, axis=1, tiled=True) for x in (call.key, call.value))
    return dataclasses.replace(call, key=key, value=value)


# -- ring --------------------------------------------------------------------------------------------------------------


def _ring(route: Route, shard: Shard) -> tuple[Array, Array]:
    own = jax.lax.axis_index(route.axes)
    held = (shard.call.key, shard.call.value)
    parts = []
    for hop, (holder, mask) in enumerate(masks_of_hops(shard.rows, own, transpose=False)):
        following = route.next(held) if hop + 1 < route.shards else held  # begins before the attention to `held`
        call = shard.of_hop(hop, *held, holder, mask)
        out, lse = route.runner.run_forward(call)
        parts.append((wide(out), route.runner.contract_lse(lse)))
        held = following
    return merge(parts)


def merge(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(output, lse) for several sets of keys together, from those of each."""
    outs, lses = zip(*parts, strict=True)
    top = reduce(jnp.maximum, lses)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    shares = [jnp.exp(lse - top) for lse in lses]
    total = reduce(jnp.add, shares)
    safe = jnp.where(total == 0, 1.0, total)
    weights = jnp.stack(shares).swapaxes(2, 3)[..., None] / safe.swapaxes(1, 2)[None, ..., None]
    out = reduce(jnp.add, [out * weight for out, weight in zip(outs, weights, strict=True)])
    return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def _ring_backward(route: Route, shard: Shard, with_bias: bool, lse: Array, delta: Array, d_out: Array) -> tuple:
    own = jax.lax.axis_index(route.axes)
    held = (shard.call.key, shard.call.value)
    d_query = jnp.zeros((), jnp.float32)
    d_held = (jnp.zeros((), jnp.float32),) * 2  # gradients of the held keys and values, from the shards they came by
    d_bias = vary(jnp.zeros_like(wide(shard.bias)), varying_axes(shard)) if shard.bias is not None else jnp.zeros(())
    for hop, (holder, mask) in enumerate(masks_of_hops(shard.rows, own, transpose=True)):
        following = route.next(held) if hop + 1 < route.shards else held
        call = shard.of_hop(hop, *held, holder, mask)
        query, key, value, *bias = route.runner.run_backward(with_bias, call, lse, delta, d_out)
        d_query = d_query + wide(query)
        arrived = route.next(d_held) if hop else d_held  # the sums of the hop before travel while this one is computed
        d_held = (arrived[0] + wide(key), arrived[1] + wide(value))
        if with_bias:
            d_bias = _add_columns(d_bias, wide(bias[0]), holder * call.kv_len)
        held = following
    home = route.next(d_held)
    given = shard.call
    grads = (d_query.astype(given.query.dtype), home[0].astype(given.key.dtype), home[1].astype(given.value.dtype))
    return grads + ((d_bias.astype(shard.bias.dtype),) if shard.bias is not None and with_bias else ())


def _add_columns(total: Array, part: Array, first: Array) -> Array:
    if total.shape == part.shape:
        return total + part
    old = jax.lax.dynamic_slice_in_dim(total, first, part.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, first, 3)
