"""The Mosaic GPU backend: Hopper's tensor cores and copy engine, bfloat16 and float16."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from xsake._ground.device import compute_capability, cpu_workers
from xsake._ground.fields import check_fields
from xsake._ground.trace import interpreting
from xsake._rewrites.few_queries import Cut, FewQueries
from xsake.backend.contract import Call, shapes_of
from xsake.backend.delta import DeltaParts
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.hopper.dkv import launch as dkv_kernel
from xsake.kernels_pallas_gpu.hopper.dkv.copied_heads import CopiedHeads
from xsake.kernels_pallas_gpu.hopper.dq import launch as dq_kernel
from xsake.kernels_pallas_gpu.hopper.forward import config as forward_config
from xsake.kernels_pallas_gpu.hopper.forward import launch as forward_kernel
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig, Pairing, mergeable
from xsake.kernels_pallas_gpu.hopper.fused import launch as fused_kernel
from xsake.kernels_pallas_gpu.hopper.fused import plan as fused_plan
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.gathered import launch as gathered
from xsake.kernels_pallas_gpu.hopper.limits import HOPPER_SHARED_MEMORY, hopper_sms
from xsake.kernels_pallas_gpu.hopper.tile import backward_config
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits, fits_in_lists
from xsake.kernels_pallas_gpu.hopper.tile.common import RowLists
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.lists import merge
from xsake.kernels_pallas_gpu.triton import backend as triton

_DTYPES = ("bfloat16", "float16")
_DIMS = (64, 96, 128, 160, 192, 256)  # head dimensions of the kernels; others are padded to the next of these
# An interpreted warpgroup may wait for a barrier in a thread of XLA's pool. At most three of a CTA's four warpgroups
# wait at a time, and so may the program that started them: a fifth thread is always free to go on.
_INTERPRETER_THREADS = 5

HONOURS = frozenset(
    {
        "bias",
        "q_segments",
        "kv_segments",
        "q_positions",
        "kv_positions",
        "sink_lse",
        "band",
        "soft_cap",
        "bitmaps",
        "page_table",
        "delta_parts",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward, the dQ and the dK/dV kernel, and of the kernel that computes all three."""

    forward: ForwardConfig
    dq: BackwardConfig
    dkv: BackwardConfig
    fused: FusedConfig = FusedConfig(use=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def running(self, direction: str) -> Config:
        apart = direction in ("dq", "dkv")
        return dataclasses.replace(self, fused=dataclasses.replace(self.fused, use=False)) if apart else self


def unavailable() -> str | None:
    if interpreting():
        workers = cpu_workers()
        if workers >= _INTERPRETER_THREADS:
            return None
        return (
            f"interpreted, it may hang unless XLA's CPU pool has {_INTERPRETER_THREADS} threads, and it has {workers}; "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX starts"
        )
    capability = compute_capability()
    if capability is None:
        return "it needs an NVIDIA GPU"
    if capability != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this one has {capability}"
    return None


def unsupported(call: Call) -> str | None:
    mask = call.mask
    if call.query.dtype.name not in _DTYPES:
        return f"query.dtype={call.query.dtype} must be one of {_DTYPES}"
    if call.page is not None and call.page % 64:
        return f"page_table: the pages of {call.page} keys must be a multiple of 64"
    if _short_blocks(call):
        if problem := _unknown_short_blocks(call):
            return problem
    elif mask.block_kv % 64:
        return f"mask.block_kv={mask.block_kv} must be a multiple of 64, or 16, 32 or 48"
    packing = Packing.of(mask.block_q, mask.heads, call.q_heads, call.kv_heads)
    if packing is None:
        return (
            f"mask.block_q={mask.block_q} must be a multiple of 64, or a power of two (at least 8 unless 16, 32 or 64 "
            f"query heads share a K/V head) that the query heads of a K/V head fill up to a multiple of 64 rows, where "
            f"these share the mask: here are {call.q_heads} query heads, {call.kv_heads} K/V heads and masks for "
            f"{mask.heads}"
        )
    if packing.group > 1 and call.bias is not None:
        return f"mask.block_q={mask.block_q} must be a multiple of 64 where there is a bias"
    for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
        if dim > _DIMS[-1]:
            return f"{name}={dim} must be at most {_DIMS[-1]}"
        if call.page is not None and dim not in _DIMS:
            return f"{name}={dim} must be one of {_DIMS} with page_table: pages are not padded"
    return None


def _short_blocks(call: Call) -> bool:
    """Whether blocks have fewer than 64 keys: the forward gathers them into tiles, and the gradients are Triton's."""
    return call.mask.block_kv < 64


def _unknown_short_blocks(call: Call) -> str | None:
    needs_64 = f"mask.block_kv={call.mask.block_kv} must be a multiple of 64"
    if call.mask.block_kv % 16:
        return f"{needs_64}, or 16, 32 or 48"
    if call.mask.block_q % 64:
        return f"{needs_64} where mask.block_q={call.mask.block_q} is not"
    for name in ("bias", "q_segments", "kv_segments", "q_positions", "kv_positions", "page_table"):
        if getattr(call, name) is not None:
            return f"{needs_64} where there is {name}"
    if call.mask.bitmaps is not None:
        return f"{needs_64} where there are bitmaps"
    return triton.unsupported(call)


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128


def default_config(call: Call) -> Config:
    d, dv = _padded(call.head_dim), _padded(call.value_dim)
    packing = _packing(call)
    blocks = packing.rows, call.mask.block_kv
    forward = forward_config.heuristic(d, dv, *_needs(call), _widest_tile(call))
    if packing.group > 1 and call.mask.bitmaps is not None:
        # A warpgroup that skips a tile would have to wait for its turn.
        forward = dataclasses.replace(forward, take_turns=False)
    return Config(
        forward=forward,
        dq=backward_config.default_dq_config(d, dv, *blocks, _vectors(call, "dq"), one_stage=_one_stage(call, "dq")),
        dkv=_with_registers_for_copies(
            call,
            backward_config.default_dkv_config(
                d, dv, *blocks, _vectors(call, "dkv"), one_stage=_one_stage(call, "dkv")
            ),
        ),
        fused=_fused(call),
    )


def search_space(call: Call) -> Sequence[Config]:
    """The default, and one kernel changed at a time: their times add up, and no kernel changes another's time."""
    default = default_config(call)
    d, dv = _padded(call.head_dim), _padded(call.value_dim)
    blocks = _packing(call).rows, call.mask.block_kv
    forwards = forward_config.search_space(d, dv, *_needs(call), _widest_tile(call))
    space = [dataclasses.replace(default, forward=c) for c in (default.forward, *forwards)]
    if _fused_knows(call):
        fused = fused_plan.search_space(_padded_shapes(call), default.fused)
        space += [dataclasses.replace(default, fused=c) for c in fused]
    for kernel in () if default.fused.use or _short_blocks(call) else ("dq", "dkv"):
        configs = backward_config.search_space(
            kernel, d, dv, *blocks, _vectors(call, kernel), one_stage=_one_stage(call, kernel)
        )
        if kernel == "dkv":
            configs = [_with_registers_for_copies(call, c) for c in configs]
        space += [dataclasses.replace(default, **{kernel: c}) for c in configs]
    return list(dict.fromkeys([default, *space]))


def misfit(call: Call, config: Config) -> str | None:
    d, dv, mask = _padded(call.head_dim), _padded(call.value_dim), call.mask
    if not config.forward.fits(d, dv, *_needs(call)):
        return "forward: it needs more shared memory or registers than a Hopper GPU has"
    if _short_blocks(call):
        return _fused_misfit(call, config)
    for name, part, resident, streamed in (
        ("dq", config.dq, _packing(call).rows, mask.block_kv),
        ("dkv", config.dkv, mask.block_kv, _packing(call).rows),
    ):
        if streamed % part.tile:
            return f"{name}: tile={part.tile} does not divide the mask's block of {streamed}"
        if name == "dkv" and part.splits(d, dv) and (part.compute_wgs != 2 or part.tile != 64):
            return f"{name}: head dims {d} and {dv} need compute_wgs=2 and tile=64"
        if part.resident_stages == 2 and (_one_stage(call, name) or (name == "dkv" and part.splits(d, dv))):
            return f"{name}: this call needs resident_stages=1"
        need = backward_config.smem_bytes(name, part, resident, d, dv, _vectors(call, name))
        if need > HOPPER_SHARED_MEMORY:
            return f"{name}: it needs {need} bytes of shared memory; {HOPPER_SHARED_MEMORY} are the limit"
    if config.dkv.gather and (problem := gathered.unknown(call, d, dv)):
        return f"dkv: gather=True: {problem}"
    if config.dkv.gather and config.dkv.compute_wgs != gathered.WGS:
        return f"dkv: gather=True needs compute_wgs={gathered.WGS}"
    return _fused_misfit(call, config)


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    if cut := _cut(call):
        few = FewQueries(call, cut)
        return merge.merged(few, *_forward(few.call, config))
    return _forward(call, config)


def _forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    q, k, v = _pad_dims(call.query, call.key, call.value)
    mask = call.mask
    rows = RowLists(mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.row_order)
    given = dict(bits=Bits.of(mask.bitmaps, mask.kv_bitmap), sink_lse=call.sink_lse, page_table=call.page_table)
    how = dict(pairing=_pairing(call), config=config.forward)
    out, lse = forward_kernel.forward(q, k, v, rows, **_arguments(call), **given, **how)
    return out[..., : call.value_dim], lse


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"] | DeltaParts,
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, None]:
    """(dQ, dK, dV, None): the operation computes the gradient of a bias.

    Of blocks under 64 keys the gradients are Triton's, tiled by its own default: `config.dq` and `config.dkv` are of
    kernels that do not run. Of `DeltaParts` the dQ kernel sums delta, where it can, for the dK/dV kernel too.
    """
    if isinstance(delta, DeltaParts) and not _sums_delta(call, config, delta):
        delta = delta.of_live_rows(call.q_segments, lse, d_out)
    if _short_blocks(call) and not config.fused.use:
        assert not isinstance(delta, DeltaParts)
        return triton.backward(call, triton.default_config(call), lse, delta, d_out, with_bias=with_bias)
    padded = _with_padded_dims(call)
    (d_out,) = _pad_dims(d_out)
    if config.fused.use:
        if not _fused_knows(call):
            raise ValueError(_fused_misfit(call, config))
        assert not isinstance(delta, DeltaParts)
        dq, dk, dv = fused_kernel.backward(padded, lse, delta, d_out, config=config.fused, interpret=_interpret())
    else:
        how = dict(interpret=_interpret())
        minus = delta if isinstance(delta, DeltaParts) else -delta
        dq, minus_delta = dq_kernel.dq(padded, lse, minus, d_out, config=config.dq, **how)
        if _gathers(call, config.dkv):
            dk, dv = gathered.dkv(padded, lse, minus_delta, d_out, config=config.dkv, **how)
        else:
            heads = CopiedHeads.of(call, config.dkv.compute_wgs) if _packing(call).group == 1 else CopiedHeads(1)
            copied = dataclasses.replace(padded, key=heads.of_keys(padded.key), value=heads.of_keys(padded.value))
            found = dkv_kernel.dkv(copied, lse, minus_delta, d_out, config=config.dkv, **how)
            dk, dv = (heads.added(x) for x in found)
    return dq[..., : call.head_dim], dk[..., : call.head_dim], dv[..., : call.value_dim], None


def _sums_delta(call: Call, config: Config, parts: DeltaParts) -> bool:
    """Whether the dQ kernel sums delta: it reads the rows of `out` whole, and as they lie in memory."""
    whole = call.q_len % call.mask.block_q == 0 and call.value_dim in _DIMS and parts.out.dtype == call.query.dtype
    apart = not config.fused.use and not _short_blocks(call)
    return whole and apart and _packing(call).group == 1 and call.q_segments is None


def _one_stage(call: Call, kernel: str) -> bool:
    """Whether the kernel cannot load resident rows ahead: packed queries, or keys for which others are gathered."""
    if kernel == "dq":
        return _packing(call).group > 1
    return _can_gather(call)


def _can_gather(call: Call) -> bool:
    return gathered.unknown(call, _padded(call.head_dim), _padded(call.value_dim)) is None


def _gathers(call: Call, config: BackwardConfig) -> bool:
    if config.gather is None:
        return _can_gather(call) and config.compute_wgs == gathered.WGS
    return config.gather


def _with_registers_for_copies(call: Call, config: BackwardConfig) -> BackwardConfig:
    """The memory warpgroup of dK/dV loads a packed tile by many copies, for which 24 registers are too few."""
    if _packing(call).group == 1 or _gathers(call, config):
        return config
    return dataclasses.replace(config, compute_registers=232, memory_registers=40)


def _fused(call: Call) -> FusedConfig:
    if not _fused_knows(call):
        return FusedConfig(use=False)
    chosen = fused_plan.heuristic(_padded_shapes(call))
    # With bitmaps it spills a few registers: tuning has to show that it is faster.
    return chosen if call.mask.bitmaps is None else dataclasses.replace(chosen, use=False)


def _fused_knows(call: Call) -> bool:
    return _packing(call).group == 1 and not _short_blocks(call)


def _fused_misfit(call: Call, config: Config) -> str | None:
    if not config.fused.use:
        return None
    if not _fused_knows(call):
        return (
            "fused: it knows no blocks under 64 queries or keys; use=False runs other kernels for dQ and for dK and dV"
        )
    problem = fused_plan.misfit(_padded_shapes(call), config.fused)
    return problem and f"fused: {problem}"


def _arguments(call: Call) -> dict[str, Any]:
    return dict(
        block_q=call.mask.block_q,
        block_kv=call.mask.block_kv,
        scale=call.scale,
        band=call.band,
        soft_cap=call.soft_cap,
        full_is_exact=call.full_is_exact,
        q_segments=call.q_segments,
        kv_segments=call.kv_segments,
        q_positions=call.q_positions,
        kv_positions=call.kv_positions,
        bias=call.bias,
        interpret=_interpret(),
    )


def _interpret() -> Any:
    return plgpu.InterpretGPUParams(detect_races=True) if interpreting() else False


def _cut(call: Call) -> Cut | None:
    if _short_blocks(call) and call.band != Band():  # parts need positions, with which tiles are as short as blocks
        return None
    return Cut.of(call, workers=2 * hopper_sms(), least_rows=64)  # each warpgroup of a CTA is a worker


def _needs(call: Call) -> tuple[Pairing, int]:
    """What the forward's tiles hold: their pairing, and the arrays with one number per key beside K and V."""
    if cut := _cut(call):
        call = shapes_of(lambda call: FewQueries(call, cut).call, call)
    has_positions = call.q_positions is not None or call.kv_positions is not None
    return _pairing(call), (call.kv_segments is not None) + has_positions


def _vectors(call: Call, kernel: str) -> int:
    """Numbers per streamed token, a key in "dq" or a query in "dkv": its segment, and for a rule its position or index.

    Keys past the end are told by their index.
    """
    ruled, segments = call.band != Band(), call.kv_segments is not None
    if kernel == "dkv":
        return ruled + segments
    by_position = ruled and call.kv_positions is not None
    by_index = (ruled and not by_position) or call.kv_len % call.mask.block_kv != 0
    return by_position + by_index + segments


def _pairing(call: Call) -> Pairing:
    widest, packing = max(_padded(call.head_dim), _padded(call.value_dim)), _packing(call)
    tests = (call.q_positions, call.kv_positions, call.kv_segments, call.bias, call.mask.bitmaps, call.page_table)
    plain = all(x is None for x in tests) and call.full_is_exact
    merged = mergeable(call.mask.block_q, call.mask.block_kv, call.q_len, call.band, plain=plain)
    heads = call.q_heads // packing.group
    return Pairing.of(packing.rows, call.mask.heads, heads, call.kv_heads, widest, mergeable=merged)


def _widest_tile(call: Call) -> int:
    """Keys of a step at most: only plain rules and bits of rows have tiles of several blocks (`Plan.tile_kv`)."""
    vectors = call.kv_segments is not None or call.q_positions is not None or call.kv_positions is not None
    bitmaps = call.mask.bitmaps
    plain = not vectors and call.bias is None and (bitmaps is None or fits_in_lists(bitmaps.shape))
    return 128 if plain else math.gcd(128, call.mask.block_kv)


def _packing(call: Call) -> Packing:
    packing = Packing.of(call.mask.block_q, call.mask.heads, call.q_heads, call.kv_heads)
    assert packing is not None, unsupported(call)
    return packing


def _padded(dim: int) -> int:
    return next(d for d in _DIMS if dim <= d)


def _with_padded_dims(call: Call) -> Call:
    q, k, v = _pad_dims(call.query, call.key, call.value)
    return dataclasses.replace(call, query=q, key=k, value=v)


def _padded_shapes(call: Call) -> Call:
    """`_with_padded_dims` of shapes alone: a configuration is chosen before anything is computed."""

    def padded(x: Array) -> Any:
        return jax.ShapeDtypeStruct((*x.shape[:3], _padded(x.shape[3])), x.dtype)

    return dataclasses.replace(call, query=padded(call.query), key=padded(call.key), value=padded(call.value))


def _pad_dims(*arrays: Array) -> list[Array]:
    """Zeros up to the next of `_DIMS`; they change no product."""
    return [
        jnp.pad(x, ((0, 0),) * 3 + ((0, _padded(x.shape[-1]) - x.shape[-1]),)) if x.shape[-1] not in _DIMS else x
        for x in arrays
    ]
