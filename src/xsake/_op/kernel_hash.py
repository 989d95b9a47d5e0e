"""A hash of what a backend compiles: its code, without comments, docstrings and layout."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from xsake._ground.room import room_of


def kernel_hash(module: ModuleType) -> str:
    """The hash of a backend's module and of the modules of its room that it imports, directly or indirectly.

    The room's other files, such as developers' tools, do not count. Nor do imports from outside the room: the code they
    bring is not hashed, so that code may move there without a new hash.
    """
    room = room_of(module.__name__)
    text = "\n".join(f"{name} {code}" for name, code in sorted(_imported_modules(module, room).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _imported_modules(module: ModuleType, room: str) -> dict[str, str]:
    """The code of `module` and of the modules it imports, by their path inside the folder of `room`."""
    assert module.__file__ is not None
    first = Path(module.__file__)
    above = max(0, module.__name__.count(".") - room.count(".") - (not hasattr(module, "__path__")))
    folder, waiting, found = first.parents[above], [first], {}
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name in found:
            continue
        found[name], imports = _code_and_imports(file.read_bytes(), room)
        for inner in imports:
            stem = folder.joinpath(*inner.split("."))
            waiting += [path for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if path.is_file()]
    return found


@cache  # several kernels of a room, and all choices of HADS, import the same modules
def _code_and_imports(source: bytes, room: str) -> tuple[str, list[str]]:
    """What of a module's source counts, and the modules of the room that it may import."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    inside = [name for node in imports for name in _modules_of(node, room)]
    return _canonical(_Stripped(room).visit(tree)), inside


def _modules_of(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """The modules of the package that a statement may import, without the package's name.

    `from package.a import b` may mean `a` and `a.b`.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
    inside = f"{package}." if package else ""
    return [name.removeprefix(inside) for name in names if name.startswith(inside)]


class _Stripped(ast.NodeTransformer):
    """Removes docstrings, imports from outside the package, and differences between versions of Python."""

    def __init__(self, package: str) -> None:
        self._package = package

    def _without_docstring(self, node: Any) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        return self.generic_visit(node)

    def _if_inside(self, node: Any) -> ast.AST | None:
        return node if _modules_of(node, self._package) else None

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Drop the empty text with which Python 3.12 ends the format of an f-string's value."""
        node.values = [value for value in node.values if not (isinstance(value, ast.Constant) and value.value == "")]
        return self.generic_visit(node)

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _without_docstring
    visit_Import = visit_ImportFrom = _if_inside


def _canonical(node: Any) -> str:
    """Like `ast.dump`, but equal on all versions of Python: leaves out fields that are None or [], as new ones are."""
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value)}' for name, value in fields.items())})"
