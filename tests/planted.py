"""A backend for tests of the tuner: the XLA backend, with configurations that are fast and wrong, slow, or endless."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Literal

import jax
import jax.numpy as jnp

from xsake import kernels_xla_ref
from xsake._measure.interference import Contention
from xsake._op import registry
from xsake.autotune.measure import contest
from xsake.autotune.measure.device_service import DeviceService
from xsake.kernels_xla_ref import HONOURS, Tiling, default_blocks, unavailable, unsupported  # noqa: F401


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    chunk: int
    how: Literal["well", "wrong", "wrong in one head", "hangs", "slow", "raises"] = "well"

    def __post_init__(self) -> None:
        if self.chunk > 64:
            raise ValueError(f"{self.chunk=} must be at most 64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    forward: Forward
    backward: Tiling


HOWS: tuple[str, ...] = ("well", "wrong", "wrong in one head", "hangs", "slow", "raises")


def default_config(call):
    default = kernels_xla_ref.default_config(call)
    return Config(forward=Forward(chunk=4), backward=default.backward)


def search_space(call):
    default = default_config(call)
    other = dataclasses.replace(default.backward, chunk=2 * default.backward.chunk)  # so that there is a choice
    space = [dataclasses.replace(default, forward=Forward(chunk=4, how=how)) for how in HOWS]
    return [*space, dataclasses.replace(default, backward=other)]


def misfit(call, config):
    return None


def _xla(call, config):
    tiling = Tiling(q=call.mask.block_q, kv=call.mask.block_kv, chunk=config.forward.chunk)
    return kernels_xla_ref.Config(forward=tiling, backward=config.backward)


def forward(call, config):
    how = config.forward.how
    if how == "raises":
        raise RuntimeError("no such instruction")
    if how == "wrong":  # reads almost nothing
        out = jnp.zeros((*call.query.shape[:3], call.value_dim), call.query.dtype)
        return out, jnp.zeros((call.batch, call.q_heads, call.q_len), jnp.float32)
    out, lse = kernels_xla_ref.forward(call, _xla(call, config))
    if how == "wrong in one head":
        out = out.at[0, -1, 0, 0].add(0.5)
    if how in ("hangs", "slow"):

        def wait(x):
            time.sleep(1000 if how == "hangs" else 0.05)
            return x

        lse = jax.pure_callback(wait, jax.ShapeDtypeStruct(lse.shape, lse.dtype), lse)
    return out, lse


def backward(call, config, *args, **kwargs):
    return kernels_xla_ref.backward(call, _xla(call, config), *args, **kwargs)


def register() -> None:
    registry._BACKENDS["planted"] = ("planted", None)


def service() -> DeviceService:
    register()
    contest.contention = lambda: contextlib.nullcontext(Contention())  # whatever else runs here
    return DeviceService(round_seconds=0.005)
