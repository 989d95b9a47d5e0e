"""Plots of studies: for every configuration field that varies, the time of each trial over the field's value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from xsake.autotune.result import Result


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """One picture per workload, block and direction, with one colour per density."""
    groups: dict[str, list[Result]] = {}
    for r in results:
        if r.measured:
            key = r.plan.key
            name = f"{r.measured[0].workload}_{key.block_q}x{key.block_kv}_{key.direction}"
            groups.setdefault(name, []).append(r)
    return [path for name, group in groups.items() if (path := _draw(name, group, folder / f"{name}.png"))]


def _draw(name: str, group: Sequence[Result], path: Path) -> Path | None:
    fields = list(dict.fromkeys(field for r in group for field in r.plan.fields))
    if not fields:
        return None
    figure = Figure(figsize=(2.6 * len(fields) + 1, 3), layout="constrained")
    axes = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
    for field, axis in zip(fields, axes, strict=True):
        values = sorted({str(part[field]) for r in group for part in r.plan.parts}, key=lambda v: (len(v), v))
        for i, r in enumerate(group):
            timed = [t for t in r.tried if t.value is not None]
            # Shift the densities sideways, so that they can be told apart.
            x = [values.index(str(t.part[field])) + 0.6 * (i + 0.5) / len(group) - 0.3 for t in timed]
            axis.scatter(x, [t.value for t in timed], s=12, label=f"density {r.plan.key.density}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(values)), values)
        axis.set_xlabel(field)
    axes[0].set_ylabel("time / heuristic's")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(name)
    figure.savefig(path, dpi=110)
    return path
