"""Pictures of a study: divergence over density, what each head keeps, and one head's mask over what it attends to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from xsake.hads.study.summary import Summary


def divergence_over_density(
    rows: Sequence[Summary], path: str | os.PathLike, shown: Sequence[str] | None = None
) -> None:
    """KL against active blocks, a line for each method that has at least two budgets; HADS thick, oracles dashed."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    names = list(dict.fromkeys(row.method for row in sorted(rows, key=lambda row: row.kl)))
    for name in names if shown is None else [name for name in names if name in shown]:
        points = sorted((row.density, max(row.kl, 1e-6)) for row in rows if row.method == name)
        style: dict[str, Any] = dict(marker="o", markersize=3, linewidth=1)
        if name == "hads":
            style |= dict(linewidth=3, color="black", zorder=3)
        elif name.startswith("oracle"):
            style |= dict(linestyle="--")
        axes.plot([100 * x for x, _ in points], [y for _, y in points], label=name, **style)
    axes.set(xlabel="active blocks (%)", ylabel="KL divergence from dense (nats a token)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    _save(figure, path)


def kept_shares(shares: np.ndarray, path: str | os.PathLike, title: str) -> None:
    """A heat map of [layers, heads]."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(4 + 0.15 * shares.shape[1], 2 + 0.15 * shares.shape[0]), layout="constrained")
    image = axes.imshow(100 * shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=axes, label="kept blocks (%)")
    _save(figure, path)


def mask_over_mass(mass: np.ndarray, kept: np.ndarray, path: str | os.PathLike, title: str) -> None:
    """One head: its true block masses [n, n] beside the same with what is dropped left white."""
    plt = _pyplot()
    figure, both = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
    shown = np.log10(np.maximum(mass, 1e-5))
    for axes, seen, name in zip(both, (np.tril(np.ones_like(kept)), kept), ("dense", "kept"), strict=True):
        image = axes.imshow(np.where(seen, shown, np.nan), vmin=-4, vmax=0, cmap="magma")
        axes.set(title=name, xlabel="key block", ylabel="query block")
    figure.colorbar(image, ax=both, label="log10 of a block's attention mass")
    figure.suptitle(title)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str | os.PathLike) -> None:
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
