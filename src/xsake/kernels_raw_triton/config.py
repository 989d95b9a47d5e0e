"""Tilings of the three kernels: the default, the search space, and what fits a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from xsake.backend.contract import Call
from xsake._ground.device import compute_capability
from xsake._ground.fields import check_fields
from xsake.kernels_raw_triton.facts import Tiling, pack_of, padded

# Bytes per block of threads that opts in to them, by compute capability.
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.7": 166912, "8.9": 101376, "9.0": 232448}
_REGISTERS_PER_THREAD = 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward, the dQ and the dK/dV kernel."""

    forward: Tiling
    dq: Tiling
    dkv: Tiling

    def __post_init__(self) -> None:
        check_fields(self)


def default_config(call: Call) -> Config:
    """For each kernel, the first of a list of preferred tilings that fits every GPU."""
    return Config(**{kernel: _default(call, kernel) for kernel in ("forward", "dq", "dkv")})


def search_space(call: Call) -> Sequence[Config]:
    """The default, and one kernel changed at a time: their times add up, and no kernel changes another's time."""
    default, capability = default_config(call), compute_capability()
    space = [default]
    options = list(itertools.product((128, 64, 32, 16), (128, 64, 32, 16), (2, 4, 8), (1, 2, 3, 4)))
    for kernel in ("forward", "dq", "dkv"):
        for rows, kv, num_warps, num_stages in options:
            tiling = Tiling(rows=rows, kv=kv, num_warps=num_warps, num_stages=num_stages)
            whole = call.mask.block_kv % kv == 0 and rows <= _rows(call) and max(rows, kv) <= 4 * min(rows, kv)
            if whole and _fits(call, kernel, tiling, capability):
                space.append(dataclasses.replace(default, **{kernel: tiling}))
    return list(dict.fromkeys(space))


def misfit(call: Call, config: Config) -> str | None:
    for kernel in ("forward", "dq", "dkv"):
        tiling = getattr(config, kernel)
        if call.mask.block_kv % tiling.kv:
            return f"{kernel}: a tile of {tiling.kv} keys does not divide blocks of {call.mask.block_kv}"
        if not _fits(call, kernel, tiling, compute_capability()):
            return f"{kernel}: it needs more shared memory or registers than this GPU has"
    return None


def _rows(call: Call) -> int:
    """Rows of a block of queries, rounded up to a power of two."""
    return padded(call.mask.block_q * pack_of(call))


def _default(call: Call, kernel: str) -> Tiling:
    block = call.mask.block_kv
    for rows, kv, num_warps, num_stages in _preferred(call, kernel):
        tiling = Tiling(
            rows=min(rows, _rows(call)), kv=min(block & -block, kv), num_warps=num_warps, num_stages=num_stages
        )
        if _fits(call, kernel, tiling, None):
            break
    return tiling


def _preferred(call: Call, kernel: str) -> list[tuple[int, int, int, int]]:
    """A warp has 16 rows of a product's left operand: rows in the forward and dQ, keys in dK/dV. More warps would
    compute the same twice."""
    least = [(16, 16, 4, 1)]
    if call.query.dtype == jnp.float32:  # without tensor cores, products need many registers
        return [(32, 32, 8, 1), (16, 16, 8, 1), *least]
    dim = max(padded(call.head_dim), padded(call.value_dim))
    if dim > 128:
        return [(64, 16, 4, 2) if kernel == "forward" else (32, 32, 4, 2), *least]
    if dim > 64 and _needs_registers(call):
        return [(32, 32, 4, 2) if kernel == "dkv" else (64, 32, 4, 2), *least]
    if kernel == "dkv":
        return [(32, 64, 4, 3), *least]
    kv = 64 if dim <= 64 else 32
    tall = kernel == "forward" and _rows(call) >= 128
    return [(128, kv, 8, 3) if tall else (64, kv, 4, 3), *least]


def _needs_registers(call: Call) -> bool:
    """Whether larger tiles would spill: with segments, a word per element, or padded head dimensions."""
    dims = (call.head_dim, call.value_dim)
    elements = call.mask.bitmaps is not None and call.mask.bitmaps.shape[3] > 1
    return elements or call.q_segments is not None or dims != tuple(map(padded, dims))


def _fits(call: Call, kernel: str, tiling: Tiling, capability: str | None) -> bool:
    """Whether a kernel with this tiling fits a GPU of the compute capability; with None, every GPU that is served."""
    limits = SHARED_MEMORY if capability not in SHARED_MEMORY else {capability: SHARED_MEMORY[capability]}
    fits = all(
        _shared_memory(call, kernel, tiling, pipelined_dots=name == "9.0") <= limit for name, limit in limits.items()
    )
    return fits and _registers(call, kernel, tiling) <= _REGISTERS_PER_THREAD


def _shared_memory(call: Call, kernel: str, tiling: Tiling, *, pipelined_dots: bool) -> int:
    """Bytes: operands that stay, buffers of streamed operands, and tiles of logits to change their layout.

    This is what the compiler was seen to allocate at most. From Hopper on (`pipelined_dots`), a product is still
    running when the next one is started, and holds one buffer more.
    """
    dims = padded(call.head_dim), padded(call.value_dim)
    row_side = tiling.rows * (dims[0] if kernel == "forward" else sum(dims))
    kv_side = tiling.kv * sum(dims)
    streaming, staying = (row_side, kv_side) if kernel == "dkv" else (kv_side, row_side)
    buffers = tiling.num_stages if pipelined_dots else max(1, tiling.num_stages - 1)
    turned = tiling.rows * tiling.kv * {"forward": 1, "dq": 1, "dkv": 2}[kernel]
    vectors = 2 * 4 * tiling.rows * tiling.num_stages  # lse and delta
    return (streaming * buffers + staying + turned) * call.query.dtype.itemsize + vectors


def _registers(call: Call, kernel: str, tiling: Tiling) -> int:
    """32-bit registers per thread: accumulators, tiles of logits, and in the forward the queries."""
    dims, tile = (padded(call.head_dim), padded(call.value_dim)), tiling.rows * tiling.kv
    words = {
        "forward": tiling.rows * dims[1] + 3 * tile // 2 + tiling.rows * dims[0] * call.query.dtype.itemsize // 4,
        "dq": tiling.rows * dims[0] + 2 * tile,
        "dkv": tiling.kv * sum(dims) + 2 * tile,
    }[kernel]
    return words // (32 * tiling.num_warps) + 40
