"""The results of an evaluation: a table on the screen, a summary and pictures in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from xsake._ground import atomic
from xsake._ground.words import in_words
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study import pictures
from xsake.hads.study.bootstrap import Difference
from xsake.hads.study.portrait import portrait
from xsake.hads.study.records import Records
from xsake.hads.study.summary import Summary, as_json, dropped, retention, summarise
from xsake.hads.study.texts import Text


def write(
    records: Records, folder: Path, *, model: Any, profile: HadsProfile, text: Text, console: Console | None = None
) -> None:
    """Print the table; write `summary.json` and three pictures, the last two of one text at the middle budget."""
    console = console or Console()
    rows = summarise(records)
    about = records.about
    blocks = f"{about['block_q']} x {about['block']}" if "block_q" in about else str(about["block"])
    title = f"{about['model']}, {about['length']} tokens in blocks of {blocks}: distance from the dense model"
    console.print(table(rows, title))
    kept = retention(records)
    for domain, method, budget, asked, share in kept:
        console.print(f"{domain}: {in_words(method)} at {budget:.0%} keeps {share:.1%} of {asked} answers")
    lost = dropped(records)
    for domain, method, budget, carriers, share in lost:
        of = f"{carriers} blocks that answers hang on"
        console.print(f"{domain}: {in_words(method)} at {budget:.0%} leaves out {share:.1%} of {of}")
    names = ("domain", "method", "budget", "carriers", "dropped")
    summary = as_json(about, rows, kept) | {"carriers": [dict(zip(names, one, strict=True)) for one in lost]}
    atomic.write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    pictures.quality_over_density(rows, kept, folder / "quality.png")
    budget = sorted({row.budget for row in rows})[len({row.budget for row in rows}) // 2]
    seen = portrait(model, profile, text.tokens, budget)
    pictures.kept_shares(
        seen.shares, folder / "heads.png", f"Blocks that each head keeps of {text.name}, {budget:.0%} in all"
    )
    title = f"Layer {seen.layer}, head {seen.head}, reading {text.name} with {budget:.0%} of the blocks"
    pictures.mask_over_mass(seen.mass, seen.kept, folder / "mask.png", title)
    console.print(f"records, summary and pictures are in {folder}")


def table(rows: Sequence[Summary], title: str) -> Table:
    """Methods by budget, best first, in 80 columns. Where there are several texts, the last columns are HADS minus the
    method with its 95% interval (none if all texts are parts of one document), and the number of texts."""
    several = any(row.sequences > 1 for row in rows)
    made = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    names = ["budget", "method", "blocks", "KL\n(nats)", "perplexity", "same\ntoken"]
    for name in names + ["HADS - method", "texts"] * several:
        made.add_column(name, justify="left" if name == "method" else "right")
    last = None
    for row in rows:
        if last is not None and row.budget != last:
            made.add_section()
        first, last = row.budget != last, row.budget
        name = in_words(row.method)
        cells = [
            f"{row.budget:.0%}" if first else "",
            f"[bold]{name}[/bold]" if row.method == "hads" else name,
            f"{row.density:.2%}",
            f"{row.kl:.4f}",
            f"{row.perplexity_gap:+.2%}",
            f"{row.same_token:.1%}",
        ]
        if several:
            cells += ["" if row.against is None else _difference(row.against), str(row.sequences)]
        made.add_row(*cells)
    return made


def _difference(of: Difference) -> str:
    interval = "" if of.low is None else rf"\[{of.low:+.4f}, {of.high:+.4f}]"
    return f"{of.mean:+.4f}\n{interval}".rstrip()
