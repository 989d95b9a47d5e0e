"""What an evaluation leaves behind: a table on the screen, a summary and pictures in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from xsake._ground import atomic
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study import pictures
from xsake.hads.study.portrait import portrait
from xsake.hads.study.records import Records
from xsake.hads.study.summary import as_json, retention, summarise
from xsake.hads.study.table import table
from xsake.hads.study.texts import Text


def write(
    records: Records, folder: Path, *, model: Any, profile: HadsProfile, text: Text, console: Console | None = None
) -> None:
    """Print the table; write `summary.json` and three pictures, the last two of one text at the middle budget."""
    console = console or Console()
    rows = summarise(records)
    about = records.about
    title = f"{about['model']}, {about['length']} tokens in blocks of {about['block']}: distance from the dense model"
    console.print(table(rows, title))
    kept = retention(records)
    for domain, method, budget, asked, share in kept:
        console.print(f"{domain}: {method} at {budget:.0%} keeps {share:.1%} of {asked} answers")
    atomic.write_text(folder / "summary.json", json.dumps(as_json(about, rows, kept), indent=1) + "\n")
    pictures.quality_over_density(rows, kept, folder / "quality.png")
    budget = sorted({row.budget for row in rows})[len({row.budget for row in rows}) // 2]
    seen = portrait(model, profile, text.tokens, budget)
    pictures.kept_shares(
        seen.shares, folder / "heads.png", f"Blocks that each head keeps of {text.name}, {budget:.0%} in all"
    )
    title = f"Layer {seen.layer}, head {seen.head}, reading {text.name} with {budget:.0%} of the blocks"
    pictures.mask_over_mass(seen.mass, seen.kept, folder / "mask.png", title)
    console.print(f"records, summary and pictures are in {folder}")
