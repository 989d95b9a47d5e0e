"""Backends of other packages: registered by a program, named by an entry point, or in a file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType

from xsake._ground.room import raised_in, room_of
from xsake.backend.contract import CONTRACT, RESULTS, Backend, Call

GROUP = "xsake.backends"
_PLATFORMS = (None, "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A backend of another package. `origin` is the module's name or its file: another process finds it by that."""

    name: str
    origin: str
    source: str | None  # the package and its version, or None: the program itself registered it
    refused: str | None = None  # why it is not even imported

    @cached_property
    def _loaded(self) -> ModuleType | str:
        """The module, or in one line why it is no backend."""
        if self.refused:
            return self.refused
        try:
            module = load(self.origin)
        except (Exception, SystemExit) as error:
            return f"{self._told} does not import: {self.in_one_line(error)}"
        missing = problem(module)
        return f"{self._told} is no backend: {missing}" if missing else module

    @property
    def _told(self) -> str:
        return self.origin if self.source is None else f"{self.origin} of {self.source}"

    @property
    def module(self) -> ModuleType | None:
        return self._loaded if isinstance(self._loaded, ModuleType) else None

    @property
    def broken(self) -> str | None:
        return self._loaded if isinstance(self._loaded, str) else None

    @property
    def platform(self) -> str | None:
        return getattr(self.module, "PLATFORM", None)

    def in_one_line(self, error: BaseException) -> str:
        """An error that the backend raised, and where."""
        text = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        at = raised_in(room_of(_module_name(self.origin)), error)
        return said if at is None else f"{said} ({at.partition(', in ')[0]})"


@cache
def installed() -> dict[str, Plugin]:
    """The backends that entry points of installed packages name. Nothing of theirs is imported yet."""
    found: dict[str, Plugin] = {}
    for point in metadata.entry_points(group=GROUP):
        source = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
        plugin = Plugin(point.name, point.value, source)
        other = found.get(point.name)
        if other is not None and (other.origin, other.source) != (plugin.origin, plugin.source):
            both = f"{other.source} and {source} both name a backend {point.name!r}: uninstall one of them"
            plugin = Plugin(point.name, point.value, source, refused=both)
        found[point.name] = plugin
    return found


def of_module(name: str, module: ModuleType | str | Path) -> Plugin:
    """A backend that a program registers, by its module, the module's name, or a file."""
    if isinstance(module, ModuleType):
        if module.__spec__ is None or getattr(module, "__file__", None) is None:
            raise ValueError(f"backend {name!r}: {module.__name__} must be a module with a file of its own")
        known = importlib.util.find_spec(module.__name__)
        origin = module.__name__ if known and known.origin == module.__spec__.origin else str(module.__file__)
    elif isinstance(module, Path) or str(module).endswith(".py") or "/" in str(module):
        path = Path(module).resolve()
        if not path.exists():
            raise ValueError(f"backend {name!r}: there is no file {module}")
        origin = str(path)
    else:
        origin = module
    return Plugin(name, origin, None)


def load(origin: str) -> ModuleType:
    """The module of this name, or in this file or folder."""
    name = _module_name(origin)
    if name == origin:
        return importlib.import_module(name)
    path = _file(origin)
    folder = str(path.parents[name.count(".") + (path.stem == "__init__")])
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(name)
    if module.__file__ is None or Path(module.__file__).resolve() != path.resolve():
        raise ImportError(f"another module is named {name!r}, that of {module.__file__}: give the file another name")
    return module


def _file(origin: str) -> Path:
    path = Path(origin)
    return path / "__init__.py" if path.is_dir() else path


def _module_name(origin: str) -> str:
    """What a file or folder is imported as: a file of a package as the package's."""
    if not origin.endswith(".py") and "/" not in origin:
        return origin
    path = _file(origin)
    parts, folder = [path.stem] if path.stem != "__init__" else [], path.parent
    while (folder / "__init__.py").exists():
        parts, folder = [folder.name, *parts], folder.parent
    return ".".join(parts)


def problem(module: ModuleType) -> str | None:
    """In one line, why a module is no backend, or None."""
    methods = {name: f for name, f in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    missing = [name for name in ("Config", "HONOURS", *methods) if not hasattr(module, name)]
    if missing:
        return f"it has no {', '.join(missing)}"
    contract = getattr(module, "CONTRACT", CONTRACT)
    if contract != CONTRACT:
        return f"it is written for version {contract!r} of xsake.backend, and this xsake has version {CONTRACT}"
    if getattr(module, "PLATFORM", None) not in _PLATFORMS:
        return f"PLATFORM={module.PLATFORM!r} must be one of {_PLATFORMS}"
    return _honours_problem(module.HONOURS) or _config_problem(module.Config) or _methods_problem(module, methods)


def _honours_problem(honours: object) -> str | None:
    if not isinstance(honours, frozenset):
        return f"HONOURS must be a frozenset of names; it is a {type(honours).__name__}"
    unknown = sorted(map(str, honours - Call.optional()))
    return f"HONOURS names {', '.join(unknown)}, which no call has: {sorted(Call.optional())}" if unknown else None


def _config_problem(config: object) -> str | None:
    frozen = isinstance(config, type) and dataclasses.is_dataclass(config) and config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not frozen:
        return "Config must be a frozen dataclass"
    unknown = [f.name for f in dataclasses.fields(config) if f.name not in RESULTS]  # type: ignore[arg-type]
    return f"Config has the fields {unknown}, which must be some of {tuple(RESULTS)}" if unknown else None


def _methods_problem(module: ModuleType, methods: dict) -> str | None:
    for name, wanted in methods.items():
        method = getattr(module, name)
        try:
            given = list(inspect.signature(inspect.unwrap(method)).parameters)
        except (TypeError, ValueError):
            return f"{name} must be a function"
        names = list(inspect.signature(wanted).parameters)[1:]
        if given != names:
            return f"{name}({', '.join(given)}) must be {name}({', '.join(names)})"
    return None
