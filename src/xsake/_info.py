"""What `xsake info` prints."""

from __future__ import annotations

import platform
from importlib import metadata

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import xsake
from xsake import _registry
from xsake._arguments import build_call


def show(console: Console | None = None) -> None:
    console = console or Console()
    devices = jax.devices()
    console.print(
        f"[bold]xsake {xsake.__version__}[/bold] on {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    console.print(f"devices: {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    console.print(
        "versions: " + ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "numpy", "triton", "libtpu"))
    )

    table = Table("implementation", "here", title="Implementations, best first", title_justify="left")
    for name, reason in xsake.implementations().items():
        table.add_row(name, "[green]available[/green]" if reason is None else f"no: {reason}")
    console.print(table)

    serves = Table(
        "call", "implementation", "configuration", title="What would serve a call here", title_justify="left"
    )
    for label, dtype, head_dim in (
        ("bfloat16, head_dim 128", jnp.bfloat16, 128),
        ("float32, head_dim 64", jnp.float32, 64),
    ):
        serves.add_row(label, *_serving(dtype, head_dim))
    console.print(serves)
    console.print("tuning: each implementation's built-in heuristic; pass config= to attention to override it")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _serving(dtype: jax.typing.DTypeLike, head_dim: int) -> tuple[str, str]:
    """Name and configuration for a causal call of 4096 tokens, from shapes alone."""
    chosen: list[tuple[str, str]] = []

    def trace(x: jax.Array) -> jax.Array:
        names = _registry.candidates(None, jax.default_backend())
        blocks = _registry.get(names[0]).default_blocks(4096, 4096, head_dim)
        call = build_call(x, x, x, None, is_causal=True, default_blocks=blocks)
        name = _registry.choose(names, call)
        chosen.append((name, str(_registry.get(name).default_config(call))))
        return x

    jax.eval_shape(trace, jax.ShapeDtypeStruct((1, 4096, 8, head_dim), dtype))
    return chosen[0]
