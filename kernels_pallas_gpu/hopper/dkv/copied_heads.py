"""dK and dV where keys are few and queries many: K/V heads are copied, so that the whole chip has work.

A CTA of the dK/dV kernel holds some keys and walks all queries of all heads that share them. Few keys, such as the
compressed ones of native sparse attention, are few CTAs with long walks. With copies of a K/V head, each for some of
its query heads, there are more CTAs; what the copies find is added up.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.limits import hopper_sms
from xsake.kernels_pallas_gpu.hopper.tile.backward import ROWS


@dataclasses.dataclass(frozen=True)
class CopiedHeads:
    copies: int  # of each K/V head

    @classmethod
    def of(cls, call: Call, compute_wgs: int) -> "CopiedHeads":
        """One copy where there is work for every SM, or where lists belong to K/V heads."""
        group = call.q_heads // call.kv_heads
        ctas = call.batch * call.kv_heads * -(-call.kv_len // (ROWS * compute_wgs))
        if ctas >= hopper_sms() or call.mask.heads not in (1, call.q_heads):
            return cls(1)
        enough = (n for n in range(1, group) if group % n == 0 and ctas * n >= 2 * hopper_sms())
        return cls(next(enough, group))

    def of_keys(self, x: Float[Array, "B S K D"]) -> Float[Array, "B S copies D"]:
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=2)

    def added(self, x: Float[Array, "B S copies D"]) -> Float[Array, "B S K D"]:
        """The gradient of a K/V head from those of its copies."""
        if self.copies == 1:
            return x
        parts = x.reshape(*x.shape[:2], -1, self.copies, x.shape[3])
        return parts.sum(3, dtype=jnp.float32).astype(x.dtype)
