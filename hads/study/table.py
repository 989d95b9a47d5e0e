"""A summary as a table to read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from xsake.hads.study.summary import Summary


def table(rows: Sequence[Summary], title: str) -> Table:
    """Methods by budget, best first. Where there are several texts, the last columns are HADS minus the method with its
    95% interval (none if all texts are parts of one document), and the number of texts."""
    several = any(row.sequences > 1 for row in rows)
    made = Table(title=title)
    names = ["budget", "method", "blocks", "KL (nats)", "perplexity", "same token"]
    for name in names + ["HADS - method", "", "texts"] * several:
        is_name = name == "method"
        made.add_column(name, justify="left" if is_name else "right", min_width=max(map(_width, rows)) * is_name)
    last = None
    for row in rows:
        if last is not None and row.budget != last:
            made.add_section()
        first, last = row.budget != last, row.budget
        cells = [
            f"{row.budget:.0%}" if first else "",
            f"[bold]{row.method}[/bold]" if row.method == "hads" else row.method,
            f"{row.density:.2%}",
            f"{row.kl:.4f}",
            f"{row.perplexity_gap:+.2%}",
            f"{row.same_token:.1%}",
        ]
        if several:
            difference = row.against
            interval = ""
            if difference is not None and difference.low is not None:
                interval = rf"\[{difference.low:+.4f}, {difference.high:+.4f}]"
            cells += ["" if difference is None else f"{difference.mean:+.4f}", interval, str(row.sequences)]
        made.add_row(*cells)
    return made


def _width(row: Summary) -> int:
    return len(row.method)
