"""The forms of the gradients: which kernels compute dQ, dK and dV of a call. The first form that is wanted runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from xsake._rewrites import rewrite
from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts
from xsake.kernels_pallas_gpu.hopper.dkv import record as dkv
from xsake.kernels_pallas_gpu.hopper.dq import record as dq
from xsake.kernels_pallas_gpu.hopper.fused import record as fused
from xsake.kernels_pallas_gpu.hopper.gathered import record as gathered
from xsake.kernels_pallas_gpu.hopper.kernel import Kernel, padded_dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """`kernels`: the records of the kernels that run, for the tuner.

    knows(call): why the form cannot serve the call, or None.
    wanted(call, config): whether this form runs, if no form before it does. A form that `wanted` a call which it does
      not know makes the call raise: true there only where the configuration asks for the form by name (`use=True`,
      `gather=True`).
    run(call, config, lse, delta, d_out): dQ, dK and dV; `delta` may be `DeltaParts` where `sums_delta(call, delta)`.
    """

    kernels: tuple[Kernel, ...]
    knows: Callable[[Call], str | None]
    wanted: Callable[[Call, Any], bool]
    run: Callable[..., tuple]
    sums_delta: Callable[[Call, DeltaParts], bool] = lambda call, parts: False


def _fused(call: Call, config: Any, lse: Array, delta: Array, d_out: Array) -> tuple[Array, Array, Array]:
    return rewrite.backward([padded_dims], call, (lse, delta, d_out), partial(fused.KERNEL.run, config=config.fused))


def _apart(
    keys: Kernel, call: Call, config: Any, lse: Array, delta: Array | DeltaParts, d_out: Array
) -> tuple[Array, Array, Array]:
    """One kernel for dQ, and `keys` for dK and dV. Given `DeltaParts`, the first sums delta for the second too."""

    def run(call: Call, lse: Array, delta: Any, d_out: Array) -> tuple[Array, Array, Array]:
        minus = delta if isinstance(delta, DeltaParts) else -delta
        d_query, minus_delta = dq.KERNEL.run(call, lse, minus, d_out, config=config.dq)
        return d_query, *keys.run(call, lse, minus_delta, d_out, config=config.dkv)

    return rewrite.backward([padded_dims], call, (lse, delta, d_out), run)


FORMS = (
    Form(
        kernels=(fused.KERNEL,),
        knows=fused.KERNEL.knows,
        wanted=lambda call, config: config.fused.use,
        run=_fused,
    ),
    Form(
        kernels=(dq.KERNEL, gathered.KERNEL),
        knows=gathered.KERNEL.knows,
        wanted=lambda call, config: gathered.wanted(call, config.dkv),
        run=partial(_apart, gathered.KERNEL),
        sums_delta=dq.sums_delta,
    ),
    Form(
        kernels=(dq.KERNEL, dkv.KERNEL),
        knows=dkv.KERNEL.knows,
        wanted=lambda call, config: True,
        run=partial(_apart, dkv.KERNEL),
        sums_delta=dq.sums_delta,
    ),
)


def form_of(call: Call, config: Any) -> Form:
    return next(form for form in FORMS if form.wanted(call, config))


def default(call: Call) -> dict[str, Any]:
    """The configurations of all gradient kernels, by the fields of `Config`: each from the first kernel that knows the
    call, or where none does from the last.
    """
    chosen: dict[str, Kernel] = {}
    for kernel in reversed([kernel for form in FORMS for kernel in form.kernels]):
        if kernel.name not in chosen or kernel.knows(call) is None:
            chosen[kernel.name] = kernel
    return {name: kernel.default(call) for name, kernel in chosen.items()}


def space(call: Call, default: Any) -> list[tuple[str, Any]]:
    """(field, configuration) for the fused kernel, and for the kernels that run by default."""
    kernels = dict.fromkeys([fused.KERNEL, *form_of(call, default).kernels])
    return [(kernel.name, config) for kernel in kernels if not kernel.knows(call) for config in kernel.space(call)]


def misfit(call: Call, config: Any) -> str | None:
    for kernel in form_of(call, config).kernels:
        if problem := kernel.misfit(call, getattr(config, kernel.name)):
            return f"{kernel.name}: {problem}"
    return None
