"""`xsake new-kernel`: a package with a small working kernel to begin with."""

from __future__ import annotations

import importlib.util
import keyword
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from xsake._cli.errors import plain_errors

# Value of --for: (the right-hand side of `PLATFORM = ...` in backend.py, the devices and the language, in words).
_KINDS = {
    "xla": ("None  # or 'gpu', 'tpu': the one platform that the kernel runs on", "any device, in plain XLA"),
    "gpu": ("'gpu'  # elsewhere it runs inside xsake.interpret()", "NVIDIA GPUs, in Pallas"),
    "tpu": ("'tpu'  # elsewhere it runs inside xsake.interpret()", "TPUs, in Pallas"),
}
_FILES = {
    "README.md": "README.md.txt",
    "gate.py": "gate.py.txt",
    "pyproject.toml": "pyproject.toml.txt",
    "my_kernel/__init__.py": "__init__.py.txt",
    "my_kernel/backend.py": "backend.py.txt",
    "my_kernel/gradients.py": "gradients.py.txt",
    "my_kernel/kernel.py": "kernel_{kind}.py.txt",
    "tests/conftest.py": "conftest.py.txt",
    "tests/test_contract.py": "test_contract.py.txt",
}


def new_kernel(
    name: Annotated[str, typer.Argument(help="Name of the package and of the implementation, such as my_kernel.")],
    kind: Annotated[str, typer.Option("--for", help="xla, gpu or tpu: what the first kernel is written in.")] = "xla",
    out: Annotated[Path, typer.Option(help="Folder to make the package's folder in.")] = Path("."),
) -> None:
    """Write a package with a small working kernel, its configuration and its tests, which pass as they are."""
    with plain_errors("test"):
        folder = out / name
        _check(name, kind, folder)
        for path, text in package(name, kind).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    typer.echo(f"{folder}: a package with a kernel for {_KINDS[kind][1]}. Next, in that folder:")
    typer.echo("  pip install -e '.[test]'     what tests, checks and the tuner need")
    typer.echo(f"  pytest                       its tests\n  xsake check {name} --quick")


def package(name: str, kind: str) -> dict[str, str]:
    """The files of the package, by their paths."""
    template = resources.files("xsake._cli") / "kernel_template"
    platform, chip = _KINDS[kind]
    files = {}
    for path, source in _FILES.items():
        text = (template / source.format(kind=kind)).read_text(encoding="utf-8")
        text = text.replace("@PLATFORM@", platform.replace("'", '"')).replace("@CHIP@", chip)
        text = text.replace("my_kernel", name).replace("my-kernel", name.replace("_", "-"))
        files[path.replace("my_kernel", name)] = text
    return files


def _check(name: str, kind: str, folder: Path) -> None:
    from xsake._op import registry

    if kind not in _KINDS:
        raise ValueError(f"--for {kind!r} must be one of {sorted(_KINDS)}")
    if not name.isidentifier() or not name.isascii() or name != name.lower() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} must be a lower-case identifier, such as my_kernel")
    if name in (*registry.CONTESTANTS, *registry.names()) or importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name!r} exists already, as an implementation or as a package: choose another name")
    if folder.exists():
        raise ValueError(f"{folder} exists already")
