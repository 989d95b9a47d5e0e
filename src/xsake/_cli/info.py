"""`xsake info`: devices, versions, and the implementation and configuration of a call."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import xsake
from xsake import tuning_db
from xsake._ground import versions
from xsake._op import registry, tuned
from xsake._op.arguments import build_call


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
        whose = registry.source(name)
        here = "[green]available[/green]" if reason is None else f"no: {escape(reason)}"
        table.add_row(name if whose is None else f"{name} ({escape(whose)})", here)
    console.print(table)
    for name, reason in versions.lacking().items():
        console.print(f"{name} cannot run here: {reason}")
    for dtype, head_dim in ((jnp.bfloat16, 128), (jnp.float32, 64)):
        name, choice = _serving(dtype, head_dim)
        console.print(f"A call in {jnp.dtype(dtype).name} with head_dim {head_dim} would be served by {name}:")
        serves = Table("direction", "configuration", "from")
        for direction, found in choice.found.items():
            fields = dataclasses.asdict(getattr(choice.config, direction)).items()
            serves.add_row(direction, ", ".join(f"{k}={v}" for k, v in fields), str(found or "heuristic"))
        console.print(serves)
    kind = tuning_db.file_name(devices[0].device_kind)
    for whose, folder in (("your own", tuning_db.user_directory()), ("shipped", tuning_db.SHIPPED)):
        there = "" if (folder / kind).exists() else " (not there)"
        console.print(f"tuning: {whose} in {folder / kind}{there}", soft_wrap=True)
    console.print("`xsake autotune` tunes for this device; config= of attention overrides its entries")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _serving(dtype: jax.typing.DTypeLike, head_dim: int) -> tuple[str, tuned.Choice]:
    """The implementation and configuration of a causal call of 4096 tokens, from shapes alone."""
    chosen: list[tuple[str, tuned.Choice]] = []

    def trace(x: jax.Array) -> jax.Array:
        names = registry.candidates(None, jax.default_backend())
        blocks = registry.get(names[0]).default_blocks(4096, 4096, head_dim)
        call = build_call(x, x, x, None, is_causal=True, default_blocks=blocks)
        name = registry.choose(names, call)
        chosen.append((name, tuned.choose(name, call)))
        return x

    jax.eval_shape(trace, jax.ShapeDtypeStruct((1, 4096, 8, head_dim), dtype))
    return chosen[0]
