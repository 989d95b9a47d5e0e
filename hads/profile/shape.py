"""What a profile looks like before there is one: for programs that are compiled ahead of calibration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xsake.hads.profile.budgets import FREE_SHARES
from xsake.hads.profile.estimator import BUCKETS, KINDS
from xsake.hads.profile.profile import HadsProfile


def profile_shape(
    *, layers: int, q_heads: int, kv_heads: int, head_dim: int, model: str, block: int, length: int
) -> HadsProfile:
    """Shapes in place of arrays. Has no digests: a compiled function must be given a profile without them."""
    heads, points = (layers, q_heads), (len(FREE_SHARES),)
    shapes: dict[str, tuple[int, ...]] = {
        "features": (*heads, len(KINDS), head_dim // 2),
        "tokens": heads,
        "distance": (*heads, len(BUCKETS)),
        "sink": heads,
        "sensitivity": heads,
        "burstiness": heads,
        "entropy": heads,
        "distance_mass": (*heads, len(BUCKETS)),
        "free_shares": points,
        "layer_shares": (*points, layers),
        "head_shares": (*points, *heads),
        "log_thresholds": points,
    }
    arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return HadsProfile(**arrays, model=model, block=block, length=length, kv_heads=kv_heads, digests=())
