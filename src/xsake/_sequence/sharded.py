"""Attention over a sequence that is cut over devices: `sharded_attention`."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Int, Shaped

from xsake._ground.device import platform_of
from xsake._ground.explicit import explicit_mesh, names_of, placed
from xsake._ground.programs import newest_programs
from xsake._ground.trace import interpret, interpreting, known_flag
from xsake._op import registry
from xsake._op.arguments import Sizes, build_call, check_arguments, check_inputs, check_mask, poisoned
from xsake._op.run import Runner
from xsake._op.shapes import Arrays, Output, Tokens
from xsake._sequence.exchange import EXCHANGES, Route, Shard
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Window
from xsake.hads.mask.lists.order import Order
from xsake.hads.mask.row_shards import RowShards
from xsake.hads.mask.shard_masks import masks_of_hops

Axes = str | tuple[str, ...] | None


def sharded_attention(
    query: Float[Arrays, "B T H D"],
    key: Float[Arrays, "_B _S K D"],
    value: Float[Arrays, "_B _S K Dv"],
    mask: BlockMask | RowShards | None = None,
    *,
    sequence: str | tuple[str, ...],
    batch: Axes = None,
    heads: Axes = None,
    mesh: Mesh | AbstractMesh | None = None,
    exchange: str = "auto",
    order: str = "contiguous",
    capacity: int | None = None,
    bias: Float[Arrays, "#B #H #T _S"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    query_seq_lengths: Int[Arrays, "B"] | None = None,
    key_value_seq_lengths: Int[Arrays, "B"] | None = None,
    segment_ids: Tokens | None = None,
    positions: Tokens | None = None,
    sinks: Float[Arrays, "H"] | Float[Arrays, "H sinks"] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    """`xsake.attention` for sequences that are cut over the devices of a mesh, so that none needs to fit one device.

    Arrays and arguments are those of `xsake.attention`, and so are the results, to rounding. Each device keeps its
    queries; keys and values travel.

    Args:
      query, key, value: whole arrays, as `jax.jit` sees them. Inside a `jax.shard_map` that has the axes of `sequence`,
        this device's part of each, with the same part of `segment_ids`, `positions` and, along its queries, of `bias`.
      mask: a `BlockMask` of the whole sequence or, cut already, what its `shard_rows` gives; inside a `jax.shard_map`
        the latter.
      sequence, batch, heads: the mesh axes, a name or several, that cut the tokens, the batch and the heads.
      mesh: None for the mesh of the arrays or the current one (`jax.set_mesh`).
      exchange: "gather" gathers keys and values a few heads at a time; "ring" passes them from device to device while
        it computes, and holds no more than two shards of them; "sparse" sends only blocks that some row of the
        receiving device lists, and takes no masks with bitmaps; "auto" is "gather".
      order: how the tokens lie on the devices. "contiguous", or "zigzag" (`xsake.zigzag` brings tokens into it), with
        which all devices have as much to do under a causal rule. Everything that has tokens (`segment_ids`,
        `positions`, `bias`, the output) lies in that order; masks and lengths speak of the sequence itself.
      capacity: for "sparse", the blocks that a device may need of another for one K/V head; None for the need of the
        mask, if the mask is concrete. A head that needs more is NaN.

    Returns:
      [B, T, H, Dv] in the query's dtype, cut like the query, or (output, lse).
    """
    check_inputs(query, key, value)
    if exchange not in ("auto", *EXCHANGES):
        raise ValueError(f"{exchange=} must be 'auto', {', '.join(map(repr, EXCHANGES[:-1]))} or {EXCHANGES[-1]!r}")
    options = Options(
        sequence=sequence,
        batch=batch,
        heads=heads,
        exchange="gather" if exchange == "auto" else exchange,
        capacity=capacity,
        scale=scale,
        is_causal=known_flag("is_causal", is_causal),
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        deterministic=deterministic,
        implementation=implementation,
        config=config,
        interpret=interpreting(),
    )
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    inside = jax.typeof(query).sharding.mesh
    names = names_of(sequence)
    manual = set(names) <= set(inside.manual_axes)
    shards = math.prod(inside.shape[name] for name in names) if manual else 1
    sizes = Sizes(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    checked = check_arguments(
        sizes,
        bias=bias,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        positions=positions,
        sinks=sinks,
        bias_keys=sizes.kv_len * shards,
    )
    arrays = dict(query=query, key=key, value=value, bias=checked.bias, sink_lse=checked.sink_lse)
    arrays |= dict(zip(("q_segments", "kv_segments"), checked.segments, strict=True))
    arrays |= dict(zip(("q_positions", "kv_positions"), checked.positions, strict=True))
    arrays |= dict(zip(("query_seq_lengths", "key_value_seq_lengths"), checked.lengths, strict=True))
    if manual:
        if not isinstance(mask, RowShards):
            raise TypeError(
                f"inside jax.shard_map, mask must be this shard's part of mask.shard_rows({shards}, order={order!r}), "
                f"given with its partition_spec; got {type(mask).__name__}"
            )
        _check_shards(mask, Order.of(shards, order))
        check_mask(mask, sizes._replace(q_len=mask.grid.q_len, kv_len=mask.grid.kv_len))  # `shard_of` checks lengths
        options = _with_capacity(options, mask, sizes.kv_heads)
        out, lse = _local(options, arrays | {"mask": mask})
    else:
        out, lse = _over(_mesh(mesh, inside, options), options, sizes, arrays, mask, order)
    return (out, lse) if known_flag("return_lse", return_lse) else out


def zigzag(x: Shaped[Arrays, "*shape"], shards: int, *, axis: int = 1) -> Shaped[Array, "*shape"]:
    """Tokens along `axis` in the order in which "zigzag" lays them on `shards` devices: 2n pieces, i beside 2n-1-i."""
    return _reordered(x, shards, axis, back=False)


def unzigzag(x: Shaped[Arrays, "*shape"], shards: int, *, axis: int = 1) -> Shaped[Array, "*shape"]:
    """The inverse of `zigzag`: tokens in the order of the sequence."""
    return _reordered(x, shards, axis, back=True)


def _reordered(x: Any, shards: int, axis: int, *, back: bool) -> Array:
    x = jnp.asarray(x)
    order = Order.of(shards, "zigzag")
    length = x.shape[axis]
    if length % order.pieces:
        raise ValueError(
            f"{length} tokens do not divide into {order.pieces} pieces for {shards} shards: pad them first"
        )
    pieces = order.places(order.pieces) if back else order.blocks(order.pieces).reshape(-1)
    axis = axis % x.ndim

    def run(x: Array) -> Array:
        split = x.reshape(*x.shape[:axis], order.pieces, length // order.pieces, *x.shape[axis + 1 :])
        return jnp.take(split, np.asarray(pieces), axis=axis).reshape(x.shape)

    if explicit_mesh(x) is None:
        return run(x)
    return jax.sharding.auto_axes(run, out_sharding=jax.typeof(x).sharding)(x)


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices made while tracing."""

    sequence: str | tuple[str, ...]
    batch: Axes = None
    heads: Axes = None
    exchange: str = "gather"
    capacity: int | None = None
    scale: float | None = None
    is_causal: bool = False
    local_window_size: Any = None
    logits_soft_cap: float | None = None
    deterministic: bool = True
    implementation: str | None = None
    config: Any = None
    interpret: bool = False

    def specs(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """How the arrays lie on the mesh: a dimension of size 1 is shared by all."""
        dims: dict[str, tuple[Axes, ...]] = {}
        dims |= dict.fromkeys(("query", "key", "value"), (self.batch, self.sequence, self.heads, None))
        dims |= dict.fromkeys(("q_segments", "kv_segments", "q_positions", "kv_positions"), (self.batch, self.sequence))
        dims |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), (self.batch,))
        dims |= dict(bias=(self.batch, self.heads, self.sequence, None), sink_lse=(None, self.heads))

        def spec(name: str, x: Any) -> Any:
            if name == "mask":
                return x.partition_spec(self.sequence, self.batch, self.heads)
            return PartitionSpec(
                *(None if size == 1 else axes for size, axes in zip(x.shape, dims[name], strict=False))
            )

        return {name: spec(name, x) for name, x in arrays.items()}


def _mesh(given: Any, of_arrays: Any, options: Options) -> Any:
    candidates = (given, of_arrays, jax.sharding.get_abstract_mesh())
    mesh = next((m for m in candidates if m is not None and not m.empty), None)
    wanted = [name for axes in (options.batch, options.sequence, options.heads) for name in names_of(axes)]
    if mesh is None:
        raise ValueError("no mesh: pass mesh=, or set one with jax.set_mesh")
    unknown = [name for name in wanted if name not in mesh.axis_names]
    if unknown or not names_of(options.sequence) or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"batch={options.batch!r}, sequence={options.sequence!r} and heads={options.heads!r} must be different "
            f"axes of the mesh, which has {', '.join(map(repr, mesh.axis_names))}"
        )
    return mesh


def _over(mesh: Any, options: Options, sizes: Sizes, arrays: dict, mask: Any, order_name: str) -> tuple[Array, Array]:
    size = {
        name: math.prod(mesh.shape[a] for a in names_of(getattr(options, name)))
        for name in ("batch", "heads", "sequence")
    }
    for name, number, what in (
        ("query", sizes.q_heads, "heads"),
        ("key", sizes.kv_heads, "heads"),
        ("query", sizes.batch, "batch"),
    ):
        if number % size[what]:
            raise ValueError(
                f"{name} has {what} {number}, which {what}={getattr(options, what)!r} cannot cut into "
                f"{size[what]} equal parts"
            )
    order = Order.of(size["sequence"], order_name)
    lengths = (sizes.q_len, sizes.kv_len)
    if mask is None:
        mask = _dense(lengths, order, options, arrays["q_positions"] is None)
    if not isinstance(mask, (BlockMask, RowShards)):
        raise TypeError(
            f"mask must be a BlockMask or None, or what its shard_rows gives; got {type(mask).__name__}: "
            f"xsake.BlockMask.from_blocks and xsake.patterns make one"
        )
    check_mask(mask, sizes)
    if isinstance(mask, BlockMask):
        mask = mask.shard_rows(order.shards, order=order.name)
    _check_shards(mask, order)
    padded = _padded(mask)
    if padded != lengths and order.name == "zigzag":
        raise ValueError(
            f"{lengths[0]} queries and {lengths[1]} keys are not {order.pieces} pieces of whole blocks "
            f"({mask.grid.block_q} x {mask.grid.block_kv}): pad them to {padded[0]} and {padded[1]}, with "
            f"key_value_seq_lengths, before they are laid in zigzag"
        )
    options = _with_capacity(options, mask, sizes.kv_heads)
    return _program(mesh, options)({k: v for k, v in arrays.items() if v is not None} | {"mask": mask})


def _dense(lengths: tuple[int, int], order: Order, options: Options, by_index: bool) -> BlockMask:
    """All blocks that the rule allows, in blocks small enough that every shard has some, whole ones in zigzag."""
    block = 128
    whole = order.name == "zigzag"
    while block > 16 and any(n < block * order.pieces or (whole and n % (block * order.pieces)) for n in lengths):
        block //= 2
    return BlockMask.full(
        *lengths,
        block_q=block,
        block_kv=block,
        is_causal=options.is_causal and by_index,
        local_window_size=options.local_window_size if by_index else None,
    )


def _with_capacity(options: Options, mask: RowShards, kv_heads: int) -> Options:
    if options.exchange != "sparse":
        if options.capacity is not None:
            raise ValueError(f"capacity={options.capacity} is of exchange='sparse', not of {options.exchange!r}")
        return options
    if mask.bitmaps is not None:
        raise NotImplementedError("exchange='sparse' takes no mask with bitmaps: use exchange='gather' or 'ring'")
    capacity = options.capacity
    if capacity is None:
        if isinstance(mask.kv_row_ptr, jax.core.Tracer):
            raise ValueError(
                "exchange='sparse' needs capacity= here: the mask is made under jit, so its need is unknown"
            )
        capacity = max(1, mask.most_to_send(kv_heads))
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(f"{capacity=} must be an int of at least 1")
    return dataclasses.replace(options, capacity=min(capacity, mask.columns))


def _check_shards(mask: RowShards, order: Order) -> None:
    mask.incomplete_heads()  # raises where it is known that the lists lack blocks
    if mask.order != order:
        raise ValueError(
            f"mask was cut for {mask.order.shards} shards in {mask.order.name!r} order; here are {order.shards}, and "
            f"order={order.name!r}"
        )


def _padded(mask: RowShards) -> tuple[int, int]:
    """The lengths of queries and keys that the devices cut into equal parts of whole blocks."""
    shards, grid = mask.order.shards, mask.grid
    return mask.rows * grid.block_q * shards, mask.columns * grid.block_kv * shards


def _pad(arrays: dict) -> dict:
    lengths, padded = (arrays["query"].shape[1], arrays["key"].shape[1]), _padded(arrays["mask"])
    if padded == lengths:
        return arrays
    axes = dict(query={1: 0}, key={1: 1}, value={1: 1}, bias={2: 0, 3: 1})
    axes |= dict(q_segments={1: 0}, kv_segments={1: 1}, q_positions={1: 0}, kv_positions={1: 1})

    def pad(name: str, x: Any) -> Any:
        if name not in axes:
            return x
        more = [0] * x.ndim
        for axis, side in axes[name].items():
            if x.shape[axis] > 1 or lengths[side] == 1:
                more[axis] = padded[side] - lengths[side]
        return jnp.pad(x, [(0, n) for n in more])

    return {name: pad(name, x) for name, x in arrays.items()}


@newest_programs
def _program(mesh: Any, options: Options) -> Any:
    """Compiled once per signature, outside `jax.jit` too."""

    def run(arrays: dict) -> tuple[Array, Array]:
        tokens = arrays["query"].shape[1]
        arrays = _pad(arrays)
        specs = options.specs(arrays)
        if mesh.explicit_axes:
            arrays = jax.tree.map(partial(placed, mesh), arrays, specs)
        results = (
            PartitionSpec(options.batch, options.sequence, options.heads, None),
            PartitionSpec(options.batch, options.sequence, options.heads),
        )
        with interpret(options.interpret):
            out, lse = jax.shard_map(
                lambda arrays: _local(options, arrays), mesh=mesh, in_specs=(specs,), out_specs=results
            )(arrays)
        if mesh.explicit_axes and tokens % arrays["mask"].order.shards:  # such tokens cannot be cut into equal parts
            whole = (PartitionSpec(spec[0], None, *spec[2:]) for spec in results)
            out, lse = (placed(mesh, x, spec) for x, spec in zip((out, lse), whole, strict=True))
        return out[:, :tokens], lse[:, :tokens]

    return run


def _local(options: Options, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """On one device: from its part of the arrays to its part of the output and of the lse, [B, T, H]."""
    shard, runner = shard_of(options, arrays, jax.lax.axis_index(options.sequence))
    shards = shard.rows.order.shards
    out, lse = Route(runner, options.exchange, options.sequence, shards, options.capacity or 0).forward(shard)
    if shard.call.q_segments is not None:
        out = jnp.where((shard.call.q_segments >= 0)[:, :, None, None], out, 0)  # also drops the cotangent of padding
    return out, lse.swapaxes(1, 2)


def shard_of(options: Options, arrays: dict[str, Any], own: Array) -> tuple[Shard, Runner]:
    """Shard number `own`, and the runner of its calls."""
    query, key, value, rows = (arrays[name] for name in ("query", "key", "value", "mask"))
    sizes = (query.shape[1], key.shape[1])
    order, grid = rows.order, rows.grid
    expected = (rows.rows * grid.block_q, rows.columns * grid.block_kv)
    if sizes != expected:
        raise ValueError(f"mask has {expected[0]} queries and {expected[1]} keys per shard; query and key have {sizes}")
    every = jnp.arange(sizes[1] * order.shards, dtype=jnp.int32)
    number = (
        order.number(own, sizes[0], jnp.arange(sizes[0], dtype=jnp.int32)),
        order.number(own, sizes[1], jnp.arange(sizes[1], dtype=jnp.int32)),
    )
    all_numbers = order.number(every // sizes[1], sizes[1], every % sizes[1])
    segments = _segments(arrays, number, (grid.q_len, grid.kv_len), (sizes[0] * order.shards, len(every)))
    band = grid.band & Band.of(options.is_causal, options.local_window_size)
    positions = (arrays.get("q_positions"), arrays.get("kv_positions"))
    by_index = positions[0] is None
    if by_index and band != Band():
        positions = tuple(x[None] for x in number)
    _, own_blocks = masks_of_hops(rows, own, transpose=False, first=1)[0]
    call = build_call(
        query,
        key,
        value,
        dataclasses.replace(own_blocks, complete=True),
        scale=options.scale,
        is_causal=options.is_causal,
        local_window_size=options.local_window_size,
        segment_ids=segments,
        positions=None if positions[0] is None else positions,
        logits_soft_cap=options.logits_soft_cap,
        deterministic=options.deterministic,
        default_blocks=(grid.block_q, grid.block_kv),
    )
    given = any(arrays.get(name) is not None for name in ("q_segments", "query_seq_lengths", "key_value_seq_lengths"))
    exact = by_index and not given and grid.band.implies(band)
    lost = rows.incomplete_heads()
    sink_lse = poisoned(arrays.get("sink_lse"), None if lost is None else lost[0], call.q_heads)
    call = dataclasses.replace(call, band=band, full_is_known=exact, sink_lse=sink_lse)

    def everywhere(x: Array) -> Array:
        return jax.lax.all_gather(x, options.sequence, axis=1, tiled=True)

    kv_segments = None if call.kv_segments is None else everywhere(call.kv_segments)
    kv_positions = None
    if call.kv_positions is not None:
        numbers = jnp.broadcast_to(all_numbers[None], (query.shape[0], len(every)))
        kv_positions = numbers if by_index else everywhere(call.kv_positions)
    by_blocks = exact and band == Band(None, 0) and call.q_segments is None and sizes[0] == sizes[1]
    shard = Shard(
        call=call,
        rows=rows,
        bias=arrays.get("bias"),
        kv_segments=kv_segments,
        kv_positions=kv_positions,
        by_blocks=by_blocks,
    )
    names = registry.candidates(options.implementation, platform_of(query))
    of_own_keys = None if shard.bias is None else shard.bias[..., : sizes[1]]  # as wide as that of any hop
    return shard, Runner.of(names, dataclasses.replace(call, bias=of_own_keys), options.config)


def _segments(arrays: dict, number: tuple, lengths: tuple, padded: tuple) -> tuple[Array, Array] | None:
    """Ids of this device's queries and keys: -1 for what is padding, by its id, by a length or since it was added."""
    sides = (("q_segments", "query_seq_lengths"), ("kv_segments", "key_value_seq_lengths"))
    if lengths == padded and all(arrays.get(name) is None for side in sides for name in side):
        return None

    def merge(side: tuple[str, str], number: Array, length: int) -> Array:
        ids, lengths = (arrays.get(name) for name in side)
        inside = number[None] < (length if lengths is None else jnp.minimum(lengths[:, None], length))
        ids = jnp.zeros((1, 1), jnp.int32) if ids is None else ids
        return jnp.where(inside & (ids >= 0), ids, -1)

    q, kv = (merge(*given) for given in zip(sides, number, lengths, strict=True))
    return q, kv
