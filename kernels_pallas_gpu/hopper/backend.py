"""The Mosaic GPU backend: Hopper's tensor cores and copy engine, bfloat16 and float16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from jax import Array
from jaxtyping import Float

from xsake._ground.device import compute_capability, cpu_workers
from xsake._ground.fields import check_fields
from xsake._ground.trace import interpreting
from xsake._rewrites import rewrite
from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.hopper import gradients
from xsake.kernels_pallas_gpu.hopper.forward import record as forward_record
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.kernel import DIMS, padded_dims, short_blocks
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.limits import hopper_sms
from xsake.kernels_pallas_gpu.lists.merge import MergedQueries

FORWARD = forward_record.KERNEL
# An interpreted warpgroup may wait for a barrier in a thread of XLA's pool. At most three of a CTA's four warpgroups
# wait at a time, and so may the program that started them: a fifth thread is always free to go on.
_INTERPRETER_THREADS = 5

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
        "bitmaps",
        "page_table",
        "joined_kv",
        "delta_parts",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward, the dQ and the dK/dV kernel, and of the kernel that computes all three."""

    forward: ForwardConfig
    dq: BackwardConfig
    dkv: BackwardConfig
    fused: FusedConfig = FusedConfig(use=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def running(self, direction: str) -> Config:
        apart = direction in ("dq", "dkv")
        return dataclasses.replace(self, fused=dataclasses.replace(self.fused, use=False)) if apart else self


def unavailable() -> str | None:
    if interpreting():
        workers = cpu_workers()
        if workers >= _INTERPRETER_THREADS:
            return None
        return (
            f"interpreted, it may hang unless XLA's CPU pool has {_INTERPRETER_THREADS} threads, and it has {workers}; "
            "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX starts"
        )
    capability = compute_capability()
    if capability is None:
        return "it needs an NVIDIA GPU"
    if capability != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this one has {capability}"
    return None


def unsupported(call: Call) -> str | None:
    for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
        if dim > DIMS[-1]:
            return f"{name}={dim} must be at most {DIMS[-1]}"
        if call.page is not None and dim not in DIMS:
            return f"{name}={dim} must be one of {DIMS} with page_table: pages are not padded"
    return FORWARD.knows(_gradient_shapes(call))


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128


def default_config(call: Call) -> Config:
    return Config(forward=FORWARD.default(_forward_shapes(call)), **gradients.default(_gradient_shapes(call)))


def search_space(call: Call) -> Sequence[Config]:
    """The default, and one kernel changed at a time: their times add up, and no kernel changes another's time."""
    default = default_config(call)
    changes = [("forward", config) for config in FORWARD.space(_forward_shapes(call))]
    changes += gradients.space(_gradient_shapes(call), default)
    return list(dict.fromkeys([default, *(dataclasses.replace(default, **{name: c}) for name, c in changes)]))


def misfit(call: Call, config: Config) -> str | None:
    if problem := FORWARD.misfit(_forward_shapes(call), config.forward):
        return f"forward: {problem}"
    return gradients.misfit(_gradient_shapes(call), config)


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    if problem := FORWARD.misfit(_forward_shapes(call), config.forward):
        raise ValueError(f"forward: {problem}")
    return rewrite.forward(FORWARD_REWRITES, call, partial(FORWARD.run, config=config.forward))


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"] | DeltaParts,
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, None]:
    """(dQ, dK, dV, None): the operation computes the gradient of a bias."""
    shapes = _gradient_shapes(call)
    form = gradients.form_of(shapes, config)
    if problem := form.knows(shapes) or gradients.misfit(shapes, config):
        raise ValueError(problem)
    if isinstance(delta, DeltaParts) and not form.sums_delta(shapes, delta):
        delta = delta.of_live_rows(call.q_segments, lse, d_out)
    return *form.run(call, config, lse, delta, d_out), None


def _few_queries(call: Call) -> MergedQueries | None:
    if short_blocks(call) and call.band != Band():
        return None  # with a band, parts need positions, and then a tile cannot be longer than a block
    return MergedQueries.of(call, workers=2 * hopper_sms(), least_rows=64)  # each warpgroup of a CTA is a worker


FORWARD_REWRITES = (_few_queries, padded_dims)


def _forward_shapes(call: Call) -> Call:
    return rewrite.shapes(FORWARD_REWRITES, call)


def _gradient_shapes(call: Call) -> Call:
    return rewrite.shapes([padded_dims], call)
