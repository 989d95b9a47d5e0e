"""A summary as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from xsake.hads.study.summary import Summary


def table(rows: Sequence[Summary], title: str) -> Table:
    """Methods by budget, best first; the last columns are HADS minus the method, with its 95% interval."""
    made = Table(title=title)
    for name in (
        "budget",
        "method",
        "active blocks",
        "KL (nats)",
        "perplexity",
        "same token",
        "HADS - method",
        "",
        "texts",
    ):
        made.add_column(name, justify="left" if name == "method" else "right")
    last = None
    for row in rows:
        if last is not None and row.budget != last:
            made.add_section()
        first, last = row.budget != last, row.budget
        difference = row.against
        interval = "" if difference is None else f"[{difference.low:+.4f}, {difference.high:+.4f}]"
        made.add_row(
            f"{row.budget:.0%}" if first else "",
            f"[bold]{row.method}[/bold]" if row.method == "hads" else row.method,
            f"{row.density:.2%}",
            f"{row.kl:.4f}",
            f"{row.perplexity_gap:+.2%}",
            f"{row.same_token:.1%}",
            "" if difference is None else f"{difference.mean:+.4f}",
            interval.replace("[", r"\["),
            str(row.sequences),
        )
    return made
