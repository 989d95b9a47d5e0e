"""The pictures of the recorded HADS study."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import record
from benchmarks.hads import union_picture
from benchmarks.hads.union_density import MOST
from benchmarks.report.study import studies
from xsake._ground.words import model
from xsake.hads.study.bootstrap import Difference
from xsake.hads.study.pictures import kept_shares, mask_over_mass, quality_over_density
from xsake.hads.study.summary import Summary

FOLDER = record.RESULTS / "hads"


def draw() -> None:
    for study in studies():
        small = study.shared()  # lines of different texts must not be compared
        summaries = [
            Summary(**r | {name: r[name] and Difference(**r[name]) for name in ("against", "loss_against")})
            for r in (study.rows if small is None else small.rows)
        ]
        answers = [tuple(task.values()) for task in study.tasks]
        quality_over_density(summaries, answers, FOLDER / f"quality-{study.name}.png")
        portrait = FOLDER / f"portrait-{study.name}.npz"
        if portrait.exists():
            seen = np.load(portrait)
            reader = f"{model(study.about['model'])} reading {study.about['length']} tokens"
            kept_shares(seen["shares"], FOLDER / f"heads-{study.name}.png", f"{reader}: blocks kept by each head")
            mask_over_mass(seen["mass"], seen["kept"], FOLDER / f"mask-{study.name}.png", f"One head of {reader}")
    for path in sorted(FOLDER.glob("union-*.json")):
        union_picture.draw(json.loads(path.read_text())["results"], path.with_suffix(".png"), MOST)
