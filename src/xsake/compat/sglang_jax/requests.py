"""Counts: how many blocks each request of a batch keeps, made on the host for every batch of prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from xsake._ground.buckets import power_of_two_at_least
from xsake.compat.sglang_jax.settings import Settings
from xsake.hads.attention.policy import default_dtype
from xsake.hads.attention.ragged import DENSE, counts_of_chunk

_LEAST = 16  # tables are as long as a request may get, or so many times shorter


class Request(NamedTuple):
    """What is noted of a request in a batch."""

    extra_key: str | None
    length: int  # of its prompt


class Counts(NamedTuple):
    """All None where no request of the batch is sparse."""

    counts: Array | np.ndarray | None = None  # i32[B, L]
    lengths: Array | np.ndarray | None = None  # i32[B]
    page_table: Array | np.ndarray | None = None  # i32[B, n], no longer than the longest request needs

    @classmethod
    def of(cls, batch: Any, settings: Settings, *, page_size: int, pages: int) -> Counts:
        requests: list[Request] | None = getattr(batch, "xsake_requests", None)
        if requests is None or settings.profile is None or not batch.forward_mode.is_extend():
            return cls()
        profile, slots = settings.profile, len(batch.seq_lens)
        counts, lengths = np.full((slots, profile.layers), DENSE, np.int32), np.zeros(slots, np.int32)
        for n, request in enumerate(requests):
            end, lengths[n] = int(batch.seq_lens[n]), max(request.length, batch.seq_lens[n])
            budget = settings.budget(request.extra_key)
            if budget is not None:
                of_chunk: dict[str, Any] = dict(start=int(batch.extend_prefix_lens[n]), end=end, length=int(lengths[n]))
                device = jax.local_devices()[0].device_kind
                of_chunk |= dict(device=device, dtype=default_dtype(device))
                counts[n] = counts_of_chunk(profile, budget, settings.policy, **of_chunk)
        if (counts == DENSE).all():
            return cls()
        own = -(-batch.seq_lens // page_size)
        width = min(max(power_of_two_at_least(int(own.max())), pages // _LEAST), pages)
        first = np.cumsum(own) - own
        place = (first[:, None] + np.arange(width)[None]) * page_size
        table = batch.cache_loc[np.minimum(place, len(batch.cache_loc) - 1)] // page_size
        return cls(counts, lengths, table.astype(np.int32))
