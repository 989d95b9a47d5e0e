"""The backend that runs everywhere: list-driven block-sparse attention in plain XLA, beside a dense oracle."""

from __future__ import annotations

from xsake.backend.contract import Call
from xsake.kernels_xla_ref.block_sparse import Config, Tiling, backward, default_config, forward, misfit, search_space

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
        "symbolic_batch",
        "bitmaps",
        "page_table",
        "joined_kv",
    }
)


def unavailable() -> str | None:
    return None


def unsupported(call: Call) -> str | None:
    return None


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128
