"""Which benchmarks there are, by the tables of benchmarks/README.md, and which of them have a record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from xsake._ground.words import identity as named
from xsake._ground.words import model
from xsake.dashboard.read.inside import Outside, read_inside

MOST_RECORD = 32 << 20  # bytes
TITLES = {
    "gpu_attention": "Attention on a GPU",
    "gpu_peers": "Attention beside FlashAttention-4 and cuDNN",
    "gpu_hops": "The hops of a ring on one GPU",
    "gpu_decode": "One new token against a long cache",
    "gpu_selection": "Tokens that choose their own blocks",
    "gpu_prompt": "Time to the first token",
    "gpu_prompt_long": "Time to the first token of long prompts",
    "gpu_blocks": "What small blocks of a mask cost",
    "gpu_generate": "Tokens per second after a long prompt",
    "gpu_generate_quality": "Writing with some of the cache's blocks",
    "gpu_first_call": "What a first call costs",
    "gpu_accuracy": "Accuracy on a GPU",
    "gpu_packing": "Small blocks of queries, packed with the heads of their group",
    "gpu_profile": "Hardware counters of the GPU kernels",
    "gpu_workbench": "JAX's own attention for Hopper, checked, tuned and raced",
    "gpu_sanitize": "Memory errors and races of the GPU kernels",
    "gpu_tests": "Tests on a GPU",
    "gpu_tests_since": "Tests on a GPU, of a later commit",
    "cpu_attention": "Attention on a CPU",
    "cpu_workbench": "Seconds of a kernel author's commands on a CPU",
    "tpu_compile": "TPU kernels that compile",
    "tpu_schedule": "Schedules of the TPU compiler",
    "tpu_gather_shapes": "Gathering short blocks on a TPU",
    "hads": "HADS and other methods",
    "hads-seed": "HADS beside an earlier version",
    "hads-chunks": "HADS, reading in chunks",
    "hads-last-rows": "HADS, the rows of a question",
    "hads-probes": "HADS with some queries measured exactly",
    "hads-shards": "HADS with equal counts for the shards of a sequence",
    "hads-union": "Keys and values that a shard of a sequence needs",
    "hads_mask_cost": "What choosing blocks costs",
    "ruler": "RULER's tasks",
    "smollm2": "SmolLM2 as it is loaded here",
    "train_gpu": "Training on a GPU",
}
_SHOWN_ELSEWHERE = ("tuning_db", "explorer/", "replays/")  # records that have pages of their own


class Benchmark(NamedTuple):
    """A row of the tables, for one record: `path` is None if nothing was recorded."""

    id: str
    title: str
    group: str
    measures: str
    command: str
    needs: str | None
    path: Path | None


def catalogue(records: Path) -> list[Benchmark]:
    """All benchmarks in the order of the README beside the records; without a README, the records there are."""
    rows = _rows_of_readme(records.parent / "README.md")
    found: list[Benchmark] = []
    for group, row in rows:
        for pattern in re.findall(r"`([^`]+)`", row.get("record in `results/`", "")):
            if not pattern.startswith(_SHOWN_ELSEWHERE) and not (pattern.endswith("/") and pattern != "hads/"):
                found += _of_row(records, group, row, pattern)
    known = {one.path for one in found}
    for path in sorted([*records.glob("*.json"), *records.glob("hads/*.json")]):
        if path not in known and "profile-" not in path.name:
            found.append(Benchmark(_id_of(path), _title(_id_of(path)), "Other", "", "", None, path))
    return found


def _of_row(records: Path, group: str, row: dict[str, str], pattern: str) -> list[Benchmark]:
    about = (group, row.get("measures", ""), row.get("command", "").strip("`"), row.get("needs"))
    if pattern == "hads/":
        paths = sorted([*records.glob("hads/summary-*.json"), *records.glob("hads/seed-*.json")])
    else:
        paths = sorted(records.glob(re.sub(r"<[^>]*>", "*", pattern)))
    made = [_benchmark(_id_of(path), path, *about) for path in paths]
    return made or [_benchmark(re.sub(r"(_<[^>]*>)?(\.json|/)$", "", pattern), None, *about)]


def _benchmark(
    identity: str, path: Path | None, group: str, measures: str, command: str, needs: str | None
) -> Benchmark:
    return Benchmark(identity, _title(identity), group, _plain(measures), command, needs and _plain(needs), path)


def _id_of(path: Path) -> str:
    """
    >>> _id_of(Path("results/hads/summary-8192-64.json")), _id_of(Path("results/gpu_peers_gpt4k.json"))
    ('hads-8192-64', 'gpu_peers_gpt4k')
    """
    if path.parent.name == "hads":
        return f"hads-{path.stem}".replace("-summary", "")
    return re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)


def _title(identity: str) -> str:
    if identity in TITLES:
        return TITLES[identity]
    if found := re.fullmatch(r"(hads-chunks)-(.+)-(\d+)", identity):
        return f"{TITLES[found[1]]}: {model(found[2])}, {found[3]} tokens"
    if found := re.fullmatch(r"(hads(?:-seed|-union|-shards)?)-(?:(.+)-)?(\d+)-(\d+)", identity):
        return f"{TITLES[found[1]]}: {model(found[2] or 'smollm2')}, {found[3]} tokens, blocks of {found[4]}"
    if found := re.fullmatch(r"(gpu_blocks|gpu_peers|ruler)_(.+)", identity):
        return f"{TITLES[found[1]]}: {named(found[2])}"
    return identity.replace("_", " ")


def _plain(text: str) -> str:
    return re.sub(r"[`*]", "", text)


def _rows_of_readme(path: Path) -> list[tuple[str, dict[str, str]]]:
    """(heading, row) of every table; a row is a dictionary by the names of its columns."""
    if not path.is_file():
        return []
    rows: list[tuple[str, dict[str, str]]] = []
    heading, columns = "", list[str]()
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if not cells or set(line) <= set("|- "):
            columns = columns if cells else []
        elif not columns:
            columns = cells
        else:
            rows.append((heading, dict(zip(columns, cells, strict=False))))
    return rows


def read_record(records: Path, path: Path) -> dict[str, Any]:
    """Raises ValueError, with the reason, if the file is no record."""
    try:
        found = json.loads(read_inside(records, path, MOST_RECORD))
    except (OSError, Outside, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("environment"), dict):
        raise ValueError(f"{path.name} is no record: it has no environment")
    return found
