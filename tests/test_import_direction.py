"""Which module may import which, read from the sources: only from lower floors, and never in a circle."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "xsake"

# From the ground up. A room imports itself and floors below its own: no floor above, and no neighbour.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("xsake._ground",),
    ("xsake.hads.mask", "xsake.tuning_db"),
    ("xsake.backend",),
    ("xsake._rewrites",),
    (
        "xsake.kernels_pallas_gpu",
        "xsake.kernels_pallas_tpu",
        "xsake.kernels_raw_triton",
        "xsake.kernels_xla_ref",
    ),
    ("xsake._op",),
    ("xsake._selection", "xsake._sequence"),
    ("xsake",),  # the door to the operation and to masks
    ("xsake._measure", "xsake.compat", "xsake.hads.profile"),
    ("xsake.hads.selection",),
    ("xsake.hads.attention", "xsake.hads.calibration"),
    ("xsake.hads",),  # the door to HADS
    ("xsake.hads.study", "xsake.autotune", "xsake.torch", "xsake.compat.sglang_jax"),
    ("xsake.model", "xsake.testing", "xsake._race"),
    ("xsake._plan", "xsake.dashboard"),
    ("xsake._cli",),
    ("xsake.__main__", "xsake.autotune.__main__", "xsake.compat.sglang_jax.__main__"),
)
# A door hands out names of the rooms behind it, which it imports when they are first asked for.
DOORS = ("xsake", "xsake.hads")


def modules() -> dict[str, Path]:
    """Every module of the package; subpackages are links to folders beside src."""
    found = {}
    for folder, _, files in os.walk(SOURCE, followlinks=True):
        for path in (Path(folder) / file for file in files if file.endswith(".py")):
            parts = path.relative_to(SOURCE).with_suffix("").parts
            found[".".join(("xsake", *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """The package's modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from the package's root"
            for alias in node.names if node.module in MODULES else ():
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imports(path)) for name, path in MODULES.items()}


def place(module: str) -> tuple[int, str]:
    """(floor, room) of a module: the longest room name that it begins with."""
    if module in DOORS:
        return next((floor, module) for floor, rooms in enumerate(FLOORS) if module in rooms)
    rooms = [
        (len(room), floor, room)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if room not in DOORS and (module == room or module.startswith(f"{room}."))
    ]
    assert rooms, f"{module} stands on no floor: name its place in FLOORS"
    return max(rooms)[1:]


@pytest.mark.parametrize("name", sorted(set(MODULES) - set(DOORS)))
def test_a_module_imports_only_floors_below_its_own(name):
    floor, room = place(name)
    for other in graph()[name] - {name}:
        other_floor, other_room = place(other)
        assert other_room == room or other_floor < floor, f"{name} imports {other}, which does not stand below it"


def test_no_modules_import_one_another_in_a_circle():
    without_doors = {
        name: {other for other in others if other not in DOORS} - {name}
        for name, others in graph().items()
        if name not in DOORS
    }
    TopologicalSorter(without_doors).prepare()  # CycleError names the circle


def test_hads_has_a_few_rooms():
    entries = [entry.name for entry in (ROOT / "hads").iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= 7, sorted(entries)


def test_no_file_is_longer_than_500_lines():
    skipped = {".git", ".mypy_cache", ".pytest_cache", "build", "dist", "vendor", "out", "node_modules", ".peers"}
    long = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".venv")]
        for path in (Path(folder) / file for file in files if file.endswith(".py")):
            lines = len(path.read_text().splitlines())
            if lines > 500:
                long[str(path.relative_to(ROOT))] = lines
    assert not long, long
