"""How the dQ and dK/dV kernels for Hopper are tiled: the configurations that fit, and which is the default."""

import dataclasses
from collections.abc import Callable
from typing import Any

from xsake._ground.fields import check_fields, one_of, whole
from xsake.kernels_pallas_gpu.limits import HOPPER_SHARED_MEMORY

ROWS = 64  # resident rows per compute warpgroup: the M of a wgmma


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the dQ or the dK/dV kernel is tiled.

    Args:
      tile: width of a streamed tile (keys for dQ, queries for dK/dV).
      stages: depth of the ring that is read first and last in a step (K for dQ, Q for dK/dV).
      inner_stages: depth of the other ring (V for dQ, dO for dK/dV).
      compute_wgs: compute warpgroups per CTA. Where a mask block is narrower than the rows of all warpgroups together,
        each warpgroup walks its own list.
      split: dK/dV only: one warpgroup computes dV and the other dK of the same keys. None: split where the accumulators
        of both do not fit in one warpgroup.
      gather: dK/dV only: read only the queries that chose a block of keys, where the mask has a bit per query; both
        warpgroups then share one ring. None: wherever `gathered.plan` knows the call.
      resident_stages: 2 loads the resident rows of the next item ahead; None does so where shared memory has room.
      compute_registers, memory_registers: registers per thread of a compute and of a memory warpgroup.
    """

    tile: int = one_of(64, 128, default=64)
    stages: int = whole(1, 32, default=2)
    inner_stages: int = whole(1, 32, default=2)
    compute_wgs: int = one_of(1, 2, default=2)
    split: bool | None = one_of(None, False, True, default=None)
    gather: bool | None = one_of(None, False, True, default=None, before=None)
    resident_stages: int | None = one_of(None, 1, 2, default=None, before=None)
    # setmaxnreg takes multiples of 8 from 24 to 256.
    compute_registers: int = whole(24, 256, multiple_of=8, default=240)
    memory_registers: int = whole(24, 256, multiple_of=8, default=24)

    def __post_init__(self) -> None:
        check_fields(self)
        # A CTA of three warpgroups starts with 168 registers per thread. If the compute warpgroups asked for more than
        # the memory warpgroup gives back, they would wait for ever.
        registers, most = self.compute_wgs * self.compute_registers + self.memory_registers, 3 * 168
        if registers > most:
            raise ValueError(f"compute_wgs * compute_registers + memory_registers = {registers} must be at most {most}")

    def splits(self, d: int, dv: int) -> bool:
        return d + dv > 256 if self.split is None else self.split


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """The configurations of the dQ or the dK/dV kernel that fit a call.

    plan: the kernel's plan of the call with a configuration: `one_stage`, `smem_bytes()` and `misfit()`.
    """

    plan: Callable[[BackwardConfig], Any]

    def first_fit(self, *candidates: dict[str, int]) -> BackwardConfig:
        """The first candidate that fits in shared memory. Whether its tile divides the mask's blocks is not checked:
        where no tile does, another kernel serves the call.
        """
        for candidate in candidates:
            config = BackwardConfig(**{"resident_stages": 1, **candidate})
            plan = self.plan(config)
            if not (config.resident_stages == 2 and plan.one_stage) and plan.smem_bytes() <= HOPPER_SHARED_MEMORY:
                return config
        dims = f"head dims {plan.head_dim} and {plan.v_head_dim}"
        raise NotImplementedError(
            f"{dims} need more than {HOPPER_SHARED_MEMORY} bytes of shared memory in every configuration"
        )

    def space(self, default: BackwardConfig, *, accumulators: int) -> list[BackwardConfig]:
        """Configurations that fit, the default first.

        `accumulators`: float32 columns that a row accumulates: head_dim for dQ, head_dim + value_dim for dK/dV.
        """
        found = {default: None, dataclasses.replace(default, resident_stages=1): None}
        for tile in (64, 128):
            for stages, inner_stages in ((2, 1), (2, 2), (3, 2), (3, 3), (4, 4)):
                config = BackwardConfig(tile=tile, stages=stages, inner_stages=inner_stages, resident_stages=1)
                # Float32 registers per thread that the accumulators take; beyond 192 they spill.
                spills = tile > ROWS and accumulators // 2 + tile > 192
                if self.misfit(config) is None and not spills:
                    two = dataclasses.replace(config, resident_stages=2)
                    found[two if self.misfit(two) is None else config] = None
        return list(found)

    def misfit(self, config: BackwardConfig) -> str | None:
        return self.plan(config).misfit()
