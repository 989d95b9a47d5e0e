"""ejkernel's parameters of kernels, as blocks of a mask and as a configuration of a backend."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class FwdParams:
    """Tiles of the forward, and how a GPU kernel runs them. None leaves the choice to XSAKE."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None


@dataclasses.dataclass(frozen=True)
class BwdParams(FwdParams):
    """Tiles of the backward, which may differ from the forward's."""


_HONOURED = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
_OF_OTHER_KERNELS = [field.name for field in dataclasses.fields(FwdParams) if field.name not in _HONOURED]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles (q, kv) per direction, where given; the kernel that has such tiles; blocks that they divide."""

    forward: FwdParams | None
    backward: FwdParams | None
    chunk_size: int | None
    implementation: str | None

    @classmethod
    def of(cls, forward: Any, backward: Any, chunk_size: Any, platform: str, fused: bool) -> Tiles:
        given = {"fwd_params": forward, "bwd_params": backward}
        for name, params in given.items():
            unknown = [field for field in _OF_OTHER_KERNELS if getattr(params, field, None) is not None]
            if unknown:
                raise NotImplementedError(f"{name}: {', '.join(unknown)} belong to other kernels: leave them None")
        sizes = {f"{of}.{name}": getattr(params, name, None) for of, params in given.items() for name in _HONOURED}
        for name, value in ({"chunk_size": chunk_size} | sizes).items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be an int of at least 1, or None")
        if chunk_size is not None and any(getattr(forward, f"{s}_blocksize", None) is not None for s in ("q", "kv")):
            raise ValueError("chunk_size and the block sizes of fwd_params say the same: give one of them")
        implementation = None
        if forward is not None or backward is not None:
            implementation = {"gpu": "triton", "cpu": "xla"}.get(platform)
            if implementation is None and backward is not None:
                raise NotImplementedError(
                    f"bwd_params on {platform}: tiles of the backward are tuned (xsake autotune); leave it None"
                )
        if fused and implementation == "triton":
            raise NotImplementedError(
                "fused_backward=True with fwd_params or bwd_params: the Triton kernels have no fused backward; leave "
                "the parameters out, and XSAKE fuses where that is faster"
            )
        return cls(forward, backward, chunk_size, implementation)

    def _side(self, side: str, default: int) -> tuple[int, int]:
        """(forward, backward) tile of "q" or "kv"."""
        one, other = (getattr(p, f"{side}_blocksize", None) for p in (self.forward, self.backward))
        one = self.chunk_size if one is None else one
        return one or other or default, other or one or default

    def sizes(self, q_len: int, kv_len: int, default: int) -> dict[str, int]:
        block_q, block_kv = (math.lcm(*self._side(side, default)) for side in ("q", "kv"))
        return dict(block_q=block_q, block_kv=block_kv, q_len=q_len, kv_len=kv_len)

    def config(self) -> Any:
        if self.implementation is None:
            return None
        pairs = [(self._side("q", 64)[i], self._side("kv", 64)[i]) for i in (0, 1)]
        if self.implementation == "xla":
            from xsake.kernels_xla_ref import Config, Tiling

            forward, backward = (Tiling(q=q, kv=kv, chunk=max(1, 2**18 // (q * kv))) for q, kv in pairs)
            return Config(forward=forward, backward=backward)
        from xsake.kernels_pallas_gpu.triton import backend as triton
        from xsake.kernels_pallas_gpu.triton.tiles import Tiling as GpuTiling

        def tiling(params: Any, pair: tuple[int, int]) -> GpuTiling:
            warps, stages = (getattr(params, name, None) for name in ("num_warps", "num_stages"))
            return GpuTiling(q=pair[0], kv=pair[1], num_warps=warps or 4, num_stages=stages or 2)

        of_gradients = tiling(self.backward, pairs[1])
        return triton.Config(forward=tiling(self.forward, pairs[0]), dq=of_gradients, dkv=of_gradients)
