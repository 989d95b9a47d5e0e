"""Integers of any dtype as int32, in which everything that counts or numbers is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake._ground.device import on_host


def as_int32(name: str, x: Any) -> Any:
    """An array of integers as int32. One out of range raises ValueError or, if traced, becomes the nearest int32.

    Narrow and unsigned integers do not do: -1, or the number of blocks, may not be among their values.
    """
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if np.can_cast(x.dtype, np.int32):
        return x.astype(np.int32)
    if isinstance(x, jax.core.Tracer):
        least = max(least, int(jnp.iinfo(x.dtype).min))
        return jnp.clip(x, least, most).astype(jnp.int32)
    known = on_host(x)
    if ((known < least) | (known > most)).any():
        raise ValueError(f"{name} must fit in int32, from {least} to {most}; got {known.min()} to {known.max()}")
    return known.astype(np.int32)
