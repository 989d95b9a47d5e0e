"""HADS over the shards of a sequence, from the recorded runs of `python -m benchmarks.hads.shards`."""

from __future__ import annotations

from benchmarks.hads.union_density import ORDERS, SHARDS
from benchmarks.hads.union_picture import title
from benchmarks.report.words import Run, facts, grid, section, unique


def union() -> str:
    """What a shard needs of the K/V blocks that its rows may attend, and what it would receive of the others'."""
    run, counts = Run.load("hads/union-8192-64"), Run.load("hads/shards-8192-64")
    by = {(title(line), line["shards"], line["order"]): line for line in run.results}
    columns = {
        (share, n): f"{words}, {n} shards"
        for share, words in (("needed_of_allowed", "needs"), ("received_of_all", "receives"))
        for n in SHARDS
    }

    def cell(mask: str, column: tuple[str, int]) -> str:
        share, shards = column
        return " / ".join(f"{by[mask, shards, order][share]['mean']:.0%}" for order in ORDERS)

    masks = {mask: mask for mask in unique(map(title, run.results))}
    return section(grid("mask", masks, columns, cell), facts(*_equal_counts(counts)), f"{run.source('jax')} One text.")


def _equal_counts(run: Run) -> list[str]:
    """What it costs to give every one of 8 shards as many blocks, and what it spares."""
    by = {(line["equal_counts_for"], line["budget"]): line for line in run.results}
    budgets = unique(line["budget"] for line in run.results)

    def costs(order: str) -> str:
        return ", ".join(f"{by[order, b]['kl_over_all_rows_together']:.2f}x at {b:.0%}" for b in budgets)

    busiest = " / ".join(
        f"{max(by['all rows together', b][f'busiest_shard_{order}']['most'] for b in budgets):.2f}" for order in ORDERS
    )
    return [
        f"Without equal counts the busiest of 8 shards has up to {busiest} times the mean number of blocks, contiguous "
        "and zigzag.",
        *(f"Equal counts for 8 shards, {order}: KL is {costs(order)} that of all rows together." for order in ORDERS),
    ]
