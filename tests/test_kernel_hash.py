"""The hash of kernels: code changes it; comments, docstrings, layout and developers' tools do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from xsake._op import registry, tuned
from xsake._op.kernel_hash import _imported_modules, kernel_hash

BACKEND = '''"""A backend."""
import jax
from made.tiles import TILE


def forward(call, config):
    """Runs the kernel."""
    from made import kernel

    return kernel.run(call, tile=TILE, scale=-1.5, name=f"{call!r:>{TILE}} rows", flags=(True, 1, 1.0, None, ...))
'''
KERNEL = """import jax
from .tiles import TILE, rounded


def run[T](call: T, /, *, tile: int = 2, **rest) -> T:
    match call, tile:
        case {"rows": [first, *_]}, 1 | 2 if (size := first) > TILE:
            return lambda x, y=b"\\x00", *z: x @ y + size
    print(f"{call=} {tile = !r} {{}}" "and" f'{tile}' f"" "" f"{'x'}{tile:#{'x'}}", rb"\\d", 1_000, 0xFF, 1e400, 2j)
    return rounded(call, tile) if tile else u"é\\u2028"
"""
TILES = "TILE = 64\n\n\ndef rounded(n, tile):\n    # up\n    return -(-n // tile) * tile\n"
FILES = {"__init__.py": BACKEND, "kernel.py": KERNEL, "tiles.py": TILES, "ahead.py": "from made import kernel\nX = 1\n"}


def hash_of(folder: Path, name: str = "made", file: str = "__init__.py") -> str:
    module = ModuleType(name)
    module.__file__ = str(folder / file)
    if file == "__init__.py":
        module.__path__ = [str(folder)]
    return kernel_hash(module)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_it_is_the_same_on_every_version_of_python(folder):
    assert hash_of(folder) == "8de38a94c5d5ef1e"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiles.py", "    # up\n", ""),
        ("tiles.py", "TILE = 64\n", "TILE = 0x40  # rows\n"),
        ("tiles.py", "    return -(-n // tile) * tile", "    return (\n        -(-n // tile)\n        * tile\n    )"),
        ("__init__.py", '"""A backend."""', ""),
        ("__init__.py", "Runs the kernel.", "Runs it."),
        ("__init__.py", "import jax\n", "import jax\nfrom elsewhere import what_moved\n"),
        ("ahead.py", "X = 1", "X = 2"),
    ],
    ids=["comment", "spelling", "layout", "module's docstring", "docstring", "import from outside", "developer's tool"],
)
def test_what_does_not_change_it(folder, file, old, new):
    before = hash_of(folder)
    assert old in FILES[file]
    (folder / file).write_text(FILES[file].replace(old, new))
    assert hash_of(folder) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiles.py", "64", "128"),
        ("tiles.py", "-(-n // tile)", "(n // tile)"),
        ("kernel.py", "tile: int = 2", "tile: int = 4"),
        ("kernel.py", "\\x00", "\\x01"),
        ("kernel.py", "import TILE, rounded", "import TILE, truncated as rounded"),
        ("__init__.py", "(True, 1,", "(1, 1,"),
        ("__init__.py", "None, ...", "..."),
        ("__init__.py", "1.0", "1"),
        ("__init__.py", "rows", "columns"),
    ],
)
def test_what_changes_it(folder, file, old, new):
    before = hash_of(folder)
    assert old in FILES[file]
    (folder / file).write_text(FILES[file].replace(old, new))
    assert hash_of(folder) != before


def test_only_imported_modules_count(folder):
    """The hash of a backend that is a module beside others."""
    before = hash_of(folder, "made.kernel", "kernel.py")
    (folder / "__init__.py").write_text("")
    assert hash_of(folder, "made.kernel", "kernel.py") == before
    (folder / "tiles.py").write_text(TILES + "more = 1\n")
    assert hash_of(folder, "made.kernel", "kernel.py") != before


@pytest.mark.parametrize("name", ["xla", "mosaic_gpu", "triton", "mosaic_tpu"])
def test_kernels_count_and_developers_tools_do_not(name):
    module = registry.get(name)
    room = ".".join(module.__name__.split(".")[:2])
    counted = set(_imported_modules(module, room))
    folder = Path(module.__file__).parent
    untuned = {"ahead.py", "oracle.py", "gathered.py", "first.py"}
    kernels = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")} - untuned
    inner = {"mosaic_gpu": "hopper/", "triton": "triton/"}.get(name, "")
    assert counted >= {f"{inner}{kernel}" for kernel in kernels if not kernel.endswith("__init__.py")}
    assert not counted & untuned


def test_a_developers_tool_leaves_the_hash_of_the_tpu_kernels(tmp_path):
    source = Path(registry.get("mosaic_tpu").__file__).parent
    folder = shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "ahead.py").write_text("changed = True\n")
    assert hash_of(folder, "xsake.kernels_pallas_tpu") == tuned.kernel_hash("mosaic_tpu")
