"""Pictures of a study: quality over density, the share that each head keeps, and one head's mask over its attention."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from xsake._ground import atomic
from xsake._ground.words import in_words
from xsake.hads.study.methods.shipped import GROUPS
from xsake.hads.study.summary import Summary

MOST_LINES = 6
# Okabe and Ito's colours, told apart by any colour vision.
RIVALS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
OWN: dict[str, dict[str, Any]] = {
    "hads": dict(color="black", linewidth=3, zorder=3),
    "oracle_gain": dict(color="grey", linestyle="--"),
}


def quality_over_density(
    rows: Sequence[Summary], answers: Sequence[tuple[str, str, float, int, float]], path: str | os.PathLike
) -> None:
    """KL, perplexity and, if there are `answers` (of `retention`), answers kept, against active blocks: a line per
    method of `shown`."""
    plt = _pyplot()
    panels = 3 if answers else 2
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4.8), layout="constrained")
    names = shown(rows, {name for _, name, *_ in answers})
    colours = dict(zip((name for name in names if name not in OWN), RIVALS, strict=False))
    for name in names:
        style: dict[str, Any] = dict(marker="o", markersize=4, linewidth=1.5, label=in_words(name))
        style |= OWN.get(name) or dict(color=colours[name])
        mine = sorted((row for row in rows if row.method == name), key=lambda row: row.density)
        shares = [100 * row.density for row in mine]
        axes[0].plot(shares, [max(row.kl, 1e-6) for row in mine], **style)
        axes[1].plot(shares, [100 * row.perplexity_gap for row in mine], **style)
        if kept := _kept(answers, name):
            axes[2].plot([100 * budget for budget, _ in kept], [100 * share for _, share in kept], **style)
    axes[0].set_ylabel("KL divergence from dense (nats per token)")
    axes[1].set_ylabel("perplexity above dense (%)")
    for axis in axes[:2]:
        _spread_out(axis)
    if answers:
        axes[2].set_ylabel("right answers kept (%), mean of tasks")
    for axis in axes:
        axis.set_xlabel("active blocks (%)")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    _save(figure, path)


def shown(rows: Sequence[Summary], asked: Collection[str] = ()) -> list[str]:
    """At most MOST_LINES methods: HADS, the oracle of its rule, then methods that were `asked` something, then the
    others by KL. No method is shown in two forms, and none that is HADS with a part replaced."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        logs.setdefault(row.method, []).append(float(np.log(max(row.kl, 1e-6))))
    order = sorted(
        logs,
        key=lambda name: (
            list(OWN).index(name) if name in OWN else len(OWN),
            name not in asked,
            float(np.mean(logs[name])),
        ),
    )
    found: dict[str, str] = {}
    for name in order:
        if name in OWN or name not in (*GROUPS.get("ablations", ()), *GROUPS["ours"], *GROUPS["oracles"]):
            found.setdefault(in_words(name).split(" + forced")[0].split(",")[0], name)
    return list(found.values())[:MOST_LINES]


def _spread_out(axis: Any) -> None:
    """A logarithmic axis, near 0 a linear one, with 1, 2 and 5 of every power of ten in numbers; a linear axis where
    all values are close to one another."""
    from matplotlib.ticker import NullFormatter, SymmetricalLogLocator

    values = np.abs([y for line in axis.get_lines() for y in line.get_ydata()])
    values = values[values > 0]
    if len(values) == 0 or values.max() < 10 * values.min():
        return
    floor = 10 ** float(np.floor(np.log10(max(values.min(), values.max() / 1e5))))
    axis.set_yscale("symlog", linthresh=floor)
    few = values.max() / values.min() < 100
    axis.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=floor, subs=[1, 2, 5] if few else [1]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


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
    logs = np.log10(np.maximum(mass, 1e-5))
    names = ("the attention of the head", "the blocks that HADS keeps")
    for axes, seen, name in zip(both, (np.tril(np.ones_like(kept)), kept), names, strict=True):
        image = axes.imshow(np.where(seen, logs, np.nan), vmin=-4, vmax=0, cmap="magma")
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
    with atomic.naming(path):
        figure.savefig(path, dpi=130)
    _pyplot().close(figure)
