"""dK and dV where keys are few and queries many: K/V heads are copied, so that the whole chip has work.

A CTA of the dK/dV kernel holds some keys and walks all queries of all heads that share them. Few keys, such as the
compressed ones of native sparse attention, are few CTAs with long walks. With copies of a K/V head, each for some of
its query heads, there are more CTAs; the gradients of the copies are added, which are in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.limits import hopper_sms


class CopiedHeads(Rewrite):
    """`copies` of each K/V head."""

    def __init__(self, given: Call, copies: int) -> None:
        super().__init__(given)
        self.copies = copies

    @classmethod
    def of(cls, call: Call, compute_wgs: int) -> CopiedHeads | None:
        """None where there is work for every SM, or where query heads are packed or lists belong to K/V heads."""
        group = call.q_heads // call.kv_heads
        ctas = call.batch * call.kv_heads * -(-call.kv_len // (ROWS * compute_wgs))
        packed = Packing.of_call(call).group > 1
        if group == 1 or packed or ctas >= hopper_sms() or call.mask.heads not in (1, call.q_heads):
            return None
        enough = (n for n in range(2, group) if group % n == 0 and ctas * n >= 2 * hopper_sms())
        return cls(call, next(enough, group))

    @property
    def call(self) -> Call:
        key, value = (jnp.repeat(x, self.copies, axis=2) for x in (self.given.key, self.given.value))
        return dataclasses.replace(self.given, key=key, value=value)

    def gradients(self, d_query: Any, d_key: Array, d_value: Array) -> tuple[Any, Array, Array]:
        return (
            d_query,
            self._added(d_key).astype(self.given.key.dtype),
            self._added(d_value).astype(self.given.value.dtype),
        )

    def _added(self, x: Float[Array, "B S copies D"]) -> Float[Array, "B S K D"]:
        return x.reshape(*x.shape[:2], -1, self.copies, x.shape[3]).sum(3, dtype=jnp.float32)
