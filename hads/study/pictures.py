"""Pictures of a study: quality over density, the share that each head keeps, and one head's mask over its attention."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from xsake.hads.study.summary import Summary


def quality_over_density(
    rows: Sequence[Summary],
    answers: Sequence[tuple[str, str, float, int, float]],
    path: str | os.PathLike,
    shown: Sequence[str] | None = None,
) -> None:
    """KL, perplexity and, if there are `answers` (of `retention`), answers kept, against active blocks: a line per
    method, HADS thick, oracles dashed."""
    plt = _pyplot()
    panels = 3 if answers else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 5), layout="constrained")
    names = list(dict.fromkeys(row.method for row in sorted(rows, key=lambda row: row.kl)))
    names = names if shown is None else [name for name in names if name in shown]
    colours = plt.get_cmap("tab20").colors
    for n, name in enumerate(names):
        style: dict[str, Any] = dict(marker="o", markersize=3, linewidth=1, label=name, color=colours[n % len(colours)])
        if name == "hads":
            style |= dict(linewidth=3, color="black", zorder=3)
        elif name.startswith("oracle"):
            style |= dict(linestyle="--")
        mine = sorted((row for row in rows if row.method == name), key=lambda row: row.density)
        shares = [100 * row.density for row in mine]
        axes[0].plot(shares, [max(row.kl, 1e-6) for row in mine], **style)
        axes[1].plot(shares, [100 * row.perplexity_gap for row in mine], **style)
        if kept := _kept(answers, name):
            axes[2].plot([100 * budget for budget, _ in kept], [100 * share for _, share in kept], **style)
    axes[0].set(ylabel="KL divergence from dense (nats per token)", yscale="log")
    axes[1].set(ylabel="perplexity above dense (%)")
    axes[1].set_yscale("symlog", linthresh=0.1)
    if answers:
        axes[2].set(ylabel="right answers kept (%), mean of tasks")
    for one in axes:
        one.set_xlabel("active blocks (%)")
        one.grid(alpha=0.3)
    axes[0].legend(fontsize=7, ncols=2)
    _save(figure, path)


def _kept(answers: Sequence[tuple[str, str, float, int, float]], method: str) -> list[tuple[float, float]]:
    """(budget, mean over tasks of the share of answers kept)."""
    shares: dict[float, list[float]] = {}
    for _, name, budget, _, share in answers:
        if name == method:
            shares.setdefault(budget, []).append(share)
    return [(budget, float(np.mean(of))) for budget, of in sorted(shares.items())]


def kept_shares(shares: np.ndarray, path: str | os.PathLike, title: str) -> None:
    """A heat map of [layers, heads]."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(4 + 0.15 * shares.shape[1], 2 + 0.15 * shares.shape[0]), layout="constrained")
    image = axes.imshow(100 * shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set(xlabel="head", ylabel="layer", title=title)
    figure.colorbar(image, ax=axes, label="kept blocks (%)")
    _save(figure, path)


def mask_over_mass(mass: np.ndarray, kept: np.ndarray, path: str | os.PathLike, title: str) -> None:
    """One head's true block masses [n, n], beside the same masses with dropped blocks left white."""
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
