"""The tables of `xsake demo`: a mask per head, and sparse attention compared to dense attention on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from xsake._ground.device import memory_limit
from xsake._measure.timing import Timing, race
from xsake.autotune.workloads import Workload
from xsake.kernels_xla_ref import oracle


def check_memory(*, length: int, heads: int, head_dim: int) -> None:
    """Raise ValueError if dense attention of this size, with its gradient, does not fit into this machine's memory."""
    device = jax.devices()[0]
    limit = memory_limit()
    needed = heads * length * 4 * (8 * head_dim + (2 * length if _peer() == "xla" else 0))  # with logits where XLA runs
    if needed > limit:
        raise ValueError(
            f"--length {length} with --heads {heads} and --head-dim {head_dim} takes {needed / 1e9:,.0f} GB, and "
            f"{device.device_kind} has {limit / 1e9:,.0f} GB: ask for fewer tokens or heads"
        )


def show(*, length: int, heads: int, head_dim: int) -> None:
    console = Console()
    workload = Workload(
        name="demo", batch=1, q_heads=heads, kv_heads=heads, length=length, head_dim=head_dim, is_causal=True
    )
    mask = workload.uneven_mask()
    console.print("\n[bold]A causal mask in which every head has its own density[/bold]")
    console.print(str(mask), highlight=False, soft_wrap=True)

    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    _parity(console, workload, dtype)
    _times(console, workload, mask, dtype)


def _parity(console: Console, workload: Workload, dtype: jax.typing.DTypeLike) -> None:
    """Compare the results to the dense oracle's, on a sequence short enough for the oracle's dense arrays."""
    small = Workload(**{**vars(workload), "length": min(workload.length, 1024)})
    mask = small.uneven_mask()
    q, k, v = small.inputs(dtype)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, dtype)

    def gradients(attend: Callable) -> tuple:
        def run(q: Array, k: Array, v: Array, cotangent: Array) -> tuple:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return out, *pull(cotangent)

        return jax.jit(run)(q, k, v, cotangent)

    table = Table(
        "", "largest difference", title=f"The same numbers as the dense oracle ({small.length} tokens, {q.dtype})"
    )
    ours, dense = gradients(xsake.attention), gradients(oracle.attention)
    for name, a, b in zip(("output", "d query", "d key", "d value"), ours, dense, strict=True):
        error = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
        table.add_row(name, f"{error:.1e}")
    console.print(table)


def _times(console: Console, workload: Workload, mask: xsake.BlockMask, dtype: jax.typing.DTypeLike) -> None:
    q, k, v = workload.inputs(dtype)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, dtype)

    def both(attend: Callable) -> tuple[Callable, Callable]:
        forward = jax.jit(attend)
        backward = jax.jit(lambda q, k, v, cotangent: jax.vjp(attend, q, k, v)[1](cotangent))
        return lambda: forward(q, k, v), lambda: backward(q, k, v, cotangent)

    dense = both(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=_peer()))
    runs = {f"dense (jax.nn, {_peer()})": dense}
    masks = {f"sparse, heads at 10% to 90% ({mask.density():.0%})": mask}
    for density in (0.43, 0.1):
        one = workload.mask(density)
        masks[f"sparse, all heads at {one.density():.0%}"] = one
    for name, one in masks.items():
        runs[name] = both(lambda q, k, v, one=one: xsake.attention(q, k, v, one))

    table = Table(
        "",
        "forward",
        "",
        "forward + backward",
        "",
        title=f"Time per call ({workload.length} tokens, {workload.q_heads} heads, {q.dtype})",
    )
    with console.status("timing"):
        forward = race({name: run[0] for name, run in runs.items()}, rounds=3)
        backward = race({name: run[1] for name, run in runs.items()}, rounds=3)
    first = next(iter(runs))
    for name in runs:
        table.add_row(
            name,
            _ms(forward[name]),
            _ratio(forward[first], forward[name]),
            _ms(backward[name]),
            _ratio(backward[first], backward[name]),
        )
    console.print(table)


def _peer() -> Literal["cudnn", "xla"]:
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


def _ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:.1f} ms"


def _ratio(reference: Timing, timing: Timing) -> str:
    return f"{reference.median / timing.median:.1f}x"
