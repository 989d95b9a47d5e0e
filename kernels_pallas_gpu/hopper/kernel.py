"""`Kernel`, the record by which the backend knows one Hopper kernel; and the dtypes and head dimensions of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake._ground.trace import interpreting
from xsake._rewrites.padded_dims import PaddedDims
from xsake.backend.contract import Call

DTYPES = ("bfloat16", "float16")
DIMS = (64, 96, 128, 160, 192, 256)  # head dimensions of the kernels; others are padded to the next of these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel, in a folder of its own. Every function takes the call that runs: its head dimensions are in `DIMS`.
    There is one forward, whose variants are fields of `ForwardConfig`; gradients have forms (`gradients.py`).

    name: the field of the backend's `Config` that holds the kernel's configuration. Kernels may share it.
    knows(call): why the kernel cannot serve the call, or None.
    default(call): a configuration that works, also where another kernel serves the call. Raises NotImplementedError
      where none fits.
    space(call): configurations worth measuring.
    misfit(call, config): why a configuration cannot serve a call that the kernel knows, or None.
    run(call, ..., config): the results; the kernel's own page says what it takes and returns.
    """

    name: str
    knows: Callable[[Call], str | None]
    default: Callable[[Call], Any]
    space: Callable[[Call], Sequence[Any]]
    misfit: Callable[[Call, Any], str | None]
    run: Callable[..., Any]


def padded_dims(call: Call) -> PaddedDims | None:
    return PaddedDims.of(call, DIMS)


def short_blocks(call: Call) -> bool:
    """Whether blocks have fewer than 64 keys: the forward and dQ gather them into tiles, dK and dV merge neighbours."""
    return call.mask.block_kv < 64


def interpretation() -> Any:
    """The `interpret` argument of a kernel: False on a GPU."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpreting() else False
