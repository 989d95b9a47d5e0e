"""Raw Triton kernels through jax-triton, for small blocks of queries on NVIDIA GPUs of compute capability 8.0 to 9.0.

They serve token-level selection: the query heads that share a K/V head and a list are the rows of one tile, read in
place. jax-triton is an extra, `xsake[triton]`.
"""

from __future__ import annotations

import os

from xsake.backend.contract import Call
from xsake._ground.device import compute_capability
from xsake._rewrites.few_queries import MOST_QUERIES
from xsake._ground.trace import interpreting
from xsake.kernels_raw_triton import versions
from xsake.kernels_raw_triton.config import SHARED_MEMORY, Config, default_config, misfit, search_space
from xsake.kernels_raw_triton.facts import Tiling
from xsake.kernels_raw_triton.launch import backward, forward

__all__ = [
    "HONOURS",
    "Config",
    "Tiling",
    "backward",
    "default_blocks",
    "default_config",
    "forward",
    "misfit",
    "search_space",
    "unavailable",
    "unsupported",
]

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_BLOCK_Q = 64
_MAX_DIM = 256

HONOURS = frozenset({"q_segments", "kv_segments", "sink_lse", "band", "bitmaps"})


def unavailable() -> str | None:
    if interpreting():
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton interprets kernels only where TRITON_INTERPRET=1 is set before Python starts"
        return versions.misfit(interpreted=True)
    capability = compute_capability()
    if capability is None:
        return "it needs an NVIDIA GPU"
    if capability not in SHARED_MEMORY:
        return f"it needs an NVIDIA GPU of compute capability {', '.join(SHARED_MEMORY)}; this one has {capability}"
    return versions.misfit(interpreted=False)


def unsupported(call: Call) -> str | None:
    mask = call.mask
    if call.query.dtype.name not in _DTYPES:
        return f"query.dtype={call.query.dtype} must be one of {_DTYPES}"
    if mask.block_q > _MOST_BLOCK_Q:
        return f"mask.block_q={mask.block_q} must be at most {_MOST_BLOCK_Q}: it serves small blocks of queries"
    if mask.bitmaps is None and call.q_len <= MOST_QUERIES:
        return f"query has {call.q_len} tokens; without a bit per token there must be more than {MOST_QUERIES}"
    if mask.block_kv % 16:
        return f"mask.block_kv={mask.block_kv} must be a multiple of 16"
    for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
        if dim > _MAX_DIM:
            return f"{name}={dim} must be at most {_MAX_DIM}"
    return None


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128  # a call without a mask is dense: not for these kernels
