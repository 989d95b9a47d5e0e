"""The tables of README.md, docs/ and benchmarks/notes/, made from recorded runs: no number there is typed by hand.

python -m benchmarks.report           rewrite every generated part of these pages
python -m benchmarks.report --check   exit 1 if a part is not what the recorded runs say

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a name of PARTS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import record
from benchmarks.report import (
    aims,
    attention,
    generation,
    hads,
    model,
    plan,
    ruler,
    selection,
    serving,
    shards,
    torch_models,
    tpu,
    tuning,
    workbench,
)

PARTS: dict[str, Callable[[], str]] = {
    "aims": aims.aims,
    "cpu_attention": attention.cpu_attention,
    "cpu_workbench": workbench.cpu_workbench,
    "gpu_attention": attention.gpu_attention,
    "gpu_blocks": attention.gpu_blocks,
    "gpu_decode": generation.gpu_decode,
    "gpu_first_call": generation.gpu_first_call,
    "gpu_generate": generation.gpu_generate,
    "gpu_generate_quality": generation.gpu_generate_quality,
    "gpu_hops": attention.gpu_hops,
    "gpu_peers": attention.gpu_peers,
    "gpu_profile": attention.gpu_profile,
    "gpu_prompt": generation.gpu_prompt,
    "gpu_prompt_long": generation.gpu_prompt_long,
    "gpu_prompt_kernels": generation.kernels_of_chunks,
    "gpu_ragged": serving.gpu_ragged,
    "gpu_selection": selection.gpu_selection,
    "gpu_short_gradients": attention.gpu_short_gradients,
    "gpu_speed": attention.gpu_speed,
    "gpu_torch_models": torch_models.gpu_torch_models,
    "gpu_workbench": workbench.gpu_workbench,
    "hads_ablations": hads.ablations,
    "hads_answers": hads.answers,
    "hads_chunks": hads.chunks,
    "hads_every_method": hads.every_method,
    "hads_first_table": hads.first_table,
    "hads_lengths": hads.lengths,
    "hads_mask_cost": hads.mask_cost,
    "hads_pays": hads.pays,
    "hads_probes": hads.probes,
    "hads_qwen": hads.qwen,
    "hads_shards": shards.union,
    "hads_short": hads.short,
    "hads_smollm2": hads.smollm2,
    "plan_check": plan.check,
    "plan_check_prompts": plan.check_prompts,
    "plan_example": plan.example,
    "plan_long_prompts": plan.long_prompts,
    "ruler_lengths": ruler.by_length,
    "ruler_steps": ruler.steps,
    "ruler_tasks": ruler.by_task,
    "ruler_weights": ruler.weights,
    "smollm2": model.smollm2,
    "tpu_compile": tpu.tpu_compile,
    "tpu_gather_shapes": tpu.tpu_gather_shapes,
    "tpu_schedule": tpu.tpu_schedule,
    "train_gpu": model.train_gpu,
    "tuning": tuning.shipped,
    "tuning_races": tuning.races,
}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages with generated parts."""
    folders = (record.ROOT / "docs", record.ROOT / "benchmarks" / "notes")
    every = [page for folder in folders for page in sorted(folder.rglob("*.md"))]
    return [page for page in (record.ROOT / "README.md", *every) if _PART.search(page.read_text())]


def parts_of(page: Path) -> list[str]:
    return [found[2] for found in _PART.finditer(page.read_text())]


def rendered(page: Path) -> str:
    """The text of a page with every generated part made anew."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in PARTS:
            raise ValueError(f"{page.name} asks for the part {found[2]!r}; benchmarks/report has {sorted(PARTS)}")
        return f"{found[1]}{PARTS[found[2]]()}\n{found[3]}"

    return _PART.sub(made, page.read_text())
