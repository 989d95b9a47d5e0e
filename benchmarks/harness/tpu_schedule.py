"""A TPU kernel's schedule as the compiler dumps it: its regions, and the cycles of its loops."""

from __future__ import annotations

import dataclasses
import glob
import re
from pathlib import Path
from typing import Any

TILE = 512 * 512
_FINAL = "-packed-bundles-post-ra.txt"
_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:")
SLOTS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")


@dataclasses.dataclass
class Region:
    number: int
    first: int
    last: int = 0
    bundles: int = 0
    slots: list[int] = dataclasses.field(default_factory=lambda: [0] * len(SLOTS))

    def issues(self, slot: str) -> int:
        return self.slots[SLOTS.index(slot)]


@dataclasses.dataclass
class Schedule:
    """The regions of one kernel, in order of appearance, and how many issues of each kind a bundle can hold."""

    regions: dict[int, Region]
    capacity: dict[str, int]
    vmem_bytes: int
    smem_bytes: int

    def loops(self) -> tuple[Region, list[Region]]:
        """The body of the grid, and the largest disjoint regions that hold the matrix products."""
        total = max(r.issues("MXU") for r in self.regions.values())
        body = min((r for r in self.regions.values() if r.issues("MXU") == total), key=lambda r: r.bundles)
        parts: list[Region] = []
        for r in sorted(self.regions.values(), key=lambda r: -r.bundles):
            apart = all(r.last < o.first or o.last < r.first for o in parts)
            if 0 < r.issues("MXU") < total and apart:
                parts.append(r)
        if sum(r.issues("MXU") for r in parts) != total:
            return body, [body]
        return body, sorted(parts, key=lambda r: r.first)

    def inner(self, loop: Region) -> Region:
        inside = (r for r in self.regions.values() if loop.first <= r.first and r.last <= loop.last)
        return min((r for r in inside if r.issues("MXU") >= 0.95 * loop.issues("MXU")), key=lambda r: r.bundles)


def dump_of(directory: Path, name: str) -> Path:
    """The final bundles of the kernel whose name begins with `name`, the last one dumped."""
    files = sorted(
        f for f in glob.glob(f"{glob.escape(str(directory))}/*-{name}*{_FINAL}") if "schedule-analysis" not in f
    )
    if not files:
        raise FileNotFoundError(f"no schedule of a kernel named {name!r}* in {directory}")
    return Path(files[-1])


def bundles_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if _BUNDLE.match(line)]


def read_schedule(directory: Path, name: str) -> Schedule:
    """The schedule of the kernel whose name begins with `name`, the last one dumped."""
    final = dump_of(directory, name)
    stamp, label = re.match(r"(\d+)-(.*)-\d+" + re.escape(_FINAL), final.name).groups()
    table = glob.glob(
        f"{glob.escape(str(directory))}/{stamp}-{glob.escape(label)}-*pre-delay_hlo-static-per-bundle-utilization*"
    )
    lines = Path(table[0]).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("== CAP"))
    capacity = dict(zip(SLOTS, map(int, lines[at + 2].split()), strict=True))
    at = next(i for i, line in enumerate(lines) if line.startswith("== UTIL"))
    usage = [list(map(int, line.split())) for line in lines[at + 1 :] if line.strip()]

    regions: dict[int, Region] = {}
    stack: list[int] = []
    for bundle, line in enumerate(bundles_of(final.read_text())):
        for number in map(int, re.findall(r"Start region (\d+)", line)):
            regions.setdefault(number, Region(number, bundle))
            stack.append(number)
        for number in stack:
            region = regions[number]
            region.bundles, region.last = region.bundles + 1, bundle
            if bundle < len(usage):
                region.slots = [a + b for a, b in zip(region.slots, usage[bundle], strict=True)]
        for number in map(int, re.findall(r"End region (\d+)", line)):
            if number in stack:
                stack.remove(number)
    sizes = {"vmem": 0, "smem": 0}
    for listing in glob.glob(f"{glob.escape(str(directory))}/{stamp}-{glob.escape(label)}-*pre-finalize-registers*"):
        for space, size in re.findall(r"space=(vmem|smem), size = (0x[0-9a-f]+), scoped", Path(listing).read_text()):
            sizes[space] += int(size, 16)
    return Schedule(regions, capacity, sizes["vmem"], sizes["smem"])


def measure(schedule: Schedule, areas: list[int]) -> dict[str, Any]:
    """Cycles of every loop per 512 x 512 tile; `areas`: logits that one pass through each loop computes."""
    body, loops = schedule.loops()
    if len(loops) != len(areas):
        raise ValueError(f"{len(loops)} loops hold matrix products, {len(areas)} were expected")
    out = []
    for loop, area in zip(loops, areas, strict=True):
        inner = schedule.inner(loop)
        out.append(
            {
                "inner": round(inner.bundles * TILE / area, 1),
                "loop": round(loop.bundles * TILE / area, 1),
                "mxu": round(inner.issues("MXU") / (schedule.capacity["MXU"] * inner.bundles), 3),
                "spills": inner.issues("SPILL"),
            }
        )
    return {
        "loops": out,
        "step": body.bundles - sum(r.bundles for r in loops),
        "vmem_bytes": schedule.vmem_bytes,
        "smem_bytes": schedule.smem_bytes,
    }
