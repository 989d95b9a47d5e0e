"""The tables of README.md and docs/, made from recorded runs: no number there is typed by hand.

python -m benchmarks.report           rewrite every generated part of README.md and docs/*.md
python -m benchmarks.report --check   exit 1 if a part is not what the recorded runs say

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a name of PARTS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import record
from benchmarks.report import (
    attention,
    chunks,
    decode,
    first_call,
    generate,
    hads,
    model,
    packing,
    peer_aims,
    plan,
    prompt,
    ruler,
    selection,
    shards,
    tpu,
    tuning,
)

PARTS: dict[str, Callable[[], str]] = {
    "cpu_attention": attention.cpu_attention,
    "gpu_aims": peer_aims.gpu_aims,
    "gpu_attention": attention.gpu_attention,
    "gpu_blocks": attention.gpu_blocks,
    "gpu_decode": decode.gpu_decode,
    "gpu_first_call": first_call.gpu_first_call,
    "gpu_generate": generate.times,
    "gpu_generate_quality": generate.quality,
    "gpu_peers": attention.gpu_peers,
    "gpu_hops": attention.gpu_hops,
    "gpu_packing": packing.gpu_packing,
    "gpu_profile": attention.gpu_profile,
    "gpu_prompt": prompt.gpu_prompt,
    "gpu_selection": selection.gpu_selection,
    "gpu_speed": attention.gpu_speed,
    "hads_chunks": chunks.chunks,
    "hads_every_method": hads.every_method,
    "hads_first_table": hads.first_table,
    "hads_mask_cost": hads.mask_cost,
    "hads_shards": shards.cost,
    "hads_short": hads.short,
    "hads_study": hads.every_study,
    "hads_union": shards.union,
    "plan_check": plan.check,
    "plan_example": plan.example,
    "ruler": ruler.ruler,
    "smollm2": model.smollm2,
    "tpu_compile": tpu.tpu_compile,
    "tpu_gather_shapes": tpu.tpu_gather_shapes,
    "tpu_schedule": tpu.tpu_schedule,
    "train_gpu": model.train_gpu,
    "tuning": tuning.shipped,
}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages with generated parts."""
    every = (record.ROOT / "README.md", *sorted((record.ROOT / "docs").rglob("*.md")))
    return [page for page in every if _PART.search(page.read_text())]


def parts_of(page: Path) -> list[str]:
    return [found[2] for found in _PART.finditer(page.read_text())]


def rendered(page: Path) -> str:
    """The text of a page with every generated part made anew."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in PARTS:
            raise ValueError(f"{page.name} asks for the part {found[2]!r}; benchmarks/report has {sorted(PARTS)}")
        return f"{found[1]}{PARTS[found[2]]()}\n{found[3]}"

    return _PART.sub(made, page.read_text())
