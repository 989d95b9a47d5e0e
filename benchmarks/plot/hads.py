"""The pictures of the recorded HADS study."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.hads import union_picture
from benchmarks.hads.methods import RIVALS, STRENGTHENED
from benchmarks.hads.union_density import MOST
from benchmarks.report.hads import ALWAYS, FOLDER, compared, of_small_study, ranked, studies
from xsake.hads.study.bootstrap import Difference
from xsake.hads.study.pictures import kept_shares, mask_over_mass, quality_over_density
from xsake.hads.study.summary import Summary


def draw() -> None:
    for run in studies():
        which = run["name"]
        small = of_small_study(run)  # lines of different texts must not be compared
        rows = compared(run)[0] if small is None else small.rows
        best = [*ranked(rows, RIVALS)[:6], *ranked(rows, STRENGTHENED)[:4]]
        summaries = [
            Summary(**r | {name: r[name] and Difference(**r[name]) for name in ("against", "loss_against")})
            for r in rows
        ]
        answers = [tuple(task.values()) for task in run["tasks"]]
        quality_over_density(summaries, answers, FOLDER / f"quality-{which}.png", ["hads", "hads_v1", *best, *ALWAYS])
        portrait = FOLDER / f"portrait-{which}.npz"
        if portrait.exists():
            seen = np.load(portrait)
            kept_shares(seen["shares"], FOLDER / f"heads-{which}.png", f"{seen['text']}: blocks kept by each head")
            head = f"layer {seen['layer']}, head {seen['head']} on {seen['text']}"
            mask_over_mass(seen["mass"], seen["kept"], FOLDER / f"mask-{which}.png", head)
    for path in sorted(FOLDER.glob("union-*.json")):
        union_picture.draw(json.loads(path.read_text())["results"], path.with_suffix(".png"), MOST)
