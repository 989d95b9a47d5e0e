"""The Pallas-Triton backend: NVIDIA GPUs from compute capability 8.0 on.

JAX has deprecated this lowering: this folder, `lists/`, `hads` and `_selection` write kernels for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake._ground.device import compute_capability, core_count
from xsake._ground.fields import check_fields
from xsake._ground.trace import interpreting
from xsake._rewrites import rewrite
from xsake._rewrites.packed_heads import PackedHeads
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.limits import REGISTERS_PER_THREAD, SHARED_MEMORY, shared_memory
from xsake.kernels_pallas_gpu.lists.merge import MergedQueries
from xsake.kernels_pallas_gpu.triton import backward as triton_backward
from xsake.kernels_pallas_gpu.triton import forward as triton_forward
from xsake.kernels_pallas_gpu.triton.tiles import Tiling, padded_dim

_PIPELINED_DOTS = ("9.0", "10.0", "10.3")
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_DIM = 512
_SMS = 108  # of an A100, where no GPU is here to ask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward, the dQ and the dK/dV kernel."""

    forward: Tiling
    dq: Tiling
    dkv: Tiling

    def __post_init__(self) -> None:
        check_fields(self)


# -- what it serves ----------------------------------------------------------------------------------------------

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
        "joined_kv",
    }
)


def unavailable() -> str | None:
    if interpreting():
        return None
    capability = compute_capability()
    if capability is None:
        return "it needs an NVIDIA GPU"
    if float(capability) < 8.0:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or above; this one has {capability}"
    return None


def unsupported(call: Call) -> str | None:
    mask = rewrite.shapes(GRADIENT_REWRITES, call).mask
    if call.query.dtype.name not in _DTYPES:
        return f"query.dtype={call.query.dtype} must be one of {_DTYPES}"
    if call.bias is not None and call.bias.dtype.name not in _DTYPES:
        return f"bias.dtype={call.bias.dtype} must be one of {_DTYPES}"
    for name, block in (("block_q", mask.block_q), ("block_kv", mask.block_kv)):
        if block % 16:
            return f"mask.{name}={block} must be a multiple of 16"
    for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
        if dim > _MAX_DIM:
            return f"{name}={dim} must be at most {_MAX_DIM}"
    if call.page is not None and call.page % 16:
        return f"page_table: the pages of {call.page} keys must be a multiple of 16"
    return None


# -- configurations ----------------------------------------------------------------------------------------------


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return tuple(min(128, padded_dim(length)) for length in (q_len, kv_len))


def default_config(call: Call) -> Config:
    """For each kernel, the first of a list of preferred tilings that fits every GPU."""
    return Config(**{kernel: _default(_run_by(kernel, call), kernel) for kernel in ("forward", "dq", "dkv")})


def search_space(call: Call) -> Sequence[Config]:
    """The default, and one kernel changed at a time: their times add up, and no kernel changes another's time."""
    default, capability = default_config(call), compute_capability()
    space = [default]
    for kernel in ("forward", "dq", "dkv"):
        run = _run_by(kernel, call)
        for q, kv, num_warps, num_stages in itertools.product((128, 64, 32, 16), (128, 64, 32, 16), (4, 8), (1, 2, 3)):
            tiling = Tiling(q=q, kv=kv, num_warps=num_warps, num_stages=num_stages)
            if _worth_trying(run, tiling) and _fits(run, kernel, tiling, capability):
                space.append(dataclasses.replace(default, **{kernel: tiling}))
    return list(dict.fromkeys(space))


def misfit(call: Call, config: Config) -> str | None:
    capability = compute_capability()
    for kernel in ("forward", "dq", "dkv"):
        tiling, run = getattr(config, kernel), _run_by(kernel, call)
        mask = run.mask
        if mask.block_q % tiling.q or mask.block_kv % tiling.kv:
            return f"{kernel}: tile {tiling.q} x {tiling.kv} does not divide block {mask.block_q} x {mask.block_kv}"
        if kernel == "forward" and call.page is not None and call.page % tiling.kv:
            return f"{kernel}: a tile of {tiling.kv} keys does not divide the page of {call.page} keys"
        if not _fits(run, kernel, tiling, capability):
            return f"{kernel}: it needs more shared memory or registers than this GPU has"
    return None


def _few_queries(call: Call) -> MergedQueries | None:
    return MergedQueries.of(call, workers=2 * (core_count() or _SMS), least_rows=16)


FORWARD_REWRITES = (_few_queries, PackedHeads.of)
GRADIENT_REWRITES = (PackedHeads.of,)


def _run_by(kernel: str, call: Call) -> Call:
    """The shapes of the call that a kernel runs in place of the given call."""
    return rewrite.shapes(FORWARD_REWRITES if kernel == "forward" else GRADIENT_REWRITES, call)


def _default(call: Call, kernel: str) -> Tiling:
    mask, dim = call.mask, max(padded_dim(call.head_dim), padded_dim(call.value_dim))
    if call.query.dtype == jnp.float32:  # without tensor cores, products need many registers
        preferred = [(16, 16, 8, 1), (16, 16, 4, 1)]
        if dim <= 128:
            preferred = [(32, 32, 8, 1), *preferred]
    elif kernel == "forward":
        preferred = [(128, 64, 4, 3)] if dim <= 64 else [(128, 64, 8, 2)]
        preferred += [(64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2), (16, 16, 4, 1)]
    else:
        preferred = [(64, 64, 4, 3)] if dim <= 64 else [(64, 64, 8, 2)]
        preferred += [(32, 32, 8, 2), (32, 32, 8, 1), (16, 16, 4, 2), (16, 16, 4, 1)]
    if dim > 64 and len(preferred) > 4 and _needs_registers(call):
        preferred = preferred[1:]
    for q, kv, num_warps, num_stages in preferred:
        tiling = Tiling(
            q=_tile(mask.block_q, q, call.q_len),
            kv=_tile(math.gcd(mask.block_kv, call.page or 0), kv, call.kv_len),
            num_warps=num_warps,
            num_stages=num_stages,
        )
        if _fits(call, kernel, tiling, None):
            break
    return tiling


def _needs_registers(call: Call) -> bool:
    """Whether the largest tiles would spill: with a bias, soft cap, token arrays or padded head dimensions."""
    padded = (padded_dim(call.head_dim), padded_dim(call.value_dim)) != (call.head_dim, call.value_dim)
    given = (call.bias, call.soft_cap, call.q_segments, call.q_positions)
    return padded or any(x is not None for x in given)


def _tile(block: int, limit: int, length: int) -> int:
    """The largest power of two that divides the block, at most `limit` and at most the sequence's length rounded up."""
    return min(block & -block, limit, padded_dim(length))


def _worth_trying(call: Call, tiling: Tiling) -> bool:
    mask = call.mask
    if mask.block_q % tiling.q or math.gcd(mask.block_kv, call.page or 0) % tiling.kv:
        return False
    smallest = 32 if min(mask.block_q & -mask.block_q, mask.block_kv & -mask.block_kv) >= 32 else 16
    return min(tiling.q, tiling.kv) >= smallest and max(tiling.q, tiling.kv) <= 4 * min(tiling.q, tiling.kv)


def _fits(call: Call, kernel: str, tiling: Tiling, capability: str | None) -> bool:
    """Whether a kernel with this tiling fits a GPU of the compute capability; with None, every known GPU."""
    limits = SHARED_MEMORY if capability is None else {capability: shared_memory(capability)}
    need = {name: _shared_memory(call, kernel, tiling, pipelined_dots=name in _PIPELINED_DOTS) for name in limits}
    fits = all(need[name] <= limit for name, limit in limits.items())
    return fits and _registers(call, kernel, tiling) <= REGISTERS_PER_THREAD


def _shared_memory(call: Call, kernel: str, tiling: Tiling, *, pipelined_dots: bool) -> int:
    """Bytes: the operands that stay, the buffers of the streamed operands, and a tile of logits to change its layout.

    This is what the compiler was seen to allocate. From Hopper on (`pipelined_dots`), a product is still running when
    the next one is started, and holds one buffer more.
    """
    dims = padded_dim(call.head_dim), padded_dim(call.value_dim)
    q_side = tiling.q * (dims[0] if kernel == "forward" else sum(dims))
    kv_side = tiling.kv * sum(dims)
    streaming, staying = (q_side, kv_side) if kernel == "dkv" else (kv_side, q_side)
    buffers = tiling.num_stages if pipelined_dots else max(1, tiling.num_stages - 1)
    turned = tiling.q * tiling.kv * {"forward": 0 if tiling.num_warps == 4 else 1, "dq": 1, "dkv": 2}[kernel]
    vectors = 2 * 4 * tiling.q * tiling.num_stages  # lse and delta
    return (streaming * buffers + staying + turned) * call.query.dtype.itemsize + vectors


def _registers(call: Call, kernel: str, tiling: Tiling) -> int:
    """32-bit registers per thread: accumulators, tiles of logits, and in the forward the queries."""
    dims, logits = (padded_dim(call.head_dim), padded_dim(call.value_dim)), tiling.q * tiling.kv
    words = {
        "forward": tiling.q * dims[1] + 3 * logits // 2 + tiling.q * dims[0] * call.query.dtype.itemsize // 4,
        "dq": tiling.q * dims[0] + 2 * logits,
        "dkv": tiling.kv * sum(dims) + 2 * logits,
    }[kernel]
    return words // (32 * tiling.num_warps) + 40


# -- running -----------------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    return rewrite.forward(FORWARD_REWRITES, call, lambda call: triton_forward.forward(call, config.forward))


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, Array | None]:
    run = partial(triton_backward.backward, dq_tiling=config.dq, dkv_tiling=config.dkv, with_bias=with_bias)
    return rewrite.backward(GRADIENT_REWRITES, call, (lse, delta, d_out), run)
