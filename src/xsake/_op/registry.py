"""Which backends exist, which can run here, and which one serves a call."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax

from xsake._ground.trace import interpreting
from xsake.backend.contract import Backend, Call

if TYPE_CHECKING:
    from types import ModuleType

    from xsake._op.plugins import Plugin

# name -> (module, platform it needs or None), best first. A module is imported only where its platform is present.
_BACKENDS: dict[str, tuple[str, str | None]] = {
    "mosaic_gpu": ("xsake.kernels_pallas_gpu.hopper.backend", "gpu"),
    "raw_triton": ("xsake.kernels_raw_triton", "gpu"),
    "triton": ("xsake.kernels_pallas_gpu.triton.backend", "gpu"),
    "mosaic_tpu": ("xsake.kernels_pallas_tpu", "tpu"),
    "xla": ("xsake.kernels_xla_ref", None),
}

# What `xsake race` calls the call without a name, and attention of other projects: no backend may stand for these.
CONTESTANTS = ("xsake", "dense", "cudnn", "tokamax", "flex", "fa4")

# The backends of other packages that a program registered, and before which of ours each is tried (None: never).
_registered: dict[str, tuple[Plugin, str | None]] = {}


class Unsupported(NotImplementedError):
    """No implementation supports a call; `reasons` says why, by the implementations' names."""

    def __init__(self, reasons: dict[str, str]) -> None:
        told = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no implementation supports this call: {told}")
        self.reasons = reasons


def _logger() -> logging.Logger:
    logger = logging.getLogger("xsake")
    level = os.environ.get("XSAKE_LOG")
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    return logger


def register_backend(name: str, module: ModuleType | str | Path, *, before: str | None = None) -> None:
    """Make a backend of your own an implementation of `xsake.attention`, for this process.

    `xsake.backend` says what such a module has. It is imported when it is first asked for; a fault in it is then an
    error of the calls that ask for it, and of no others.

    Args:
      name: the backend's name, for `implementation=` and in messages; no name of XSAKE's or of `xsake race`.
      module: the module, its name, or the path of its file. Processes that the tuner and `xsake check` start find it by
        name or path: it must be a file.
      before: calls that name no implementation try this one before that one of XSAKE's, such as "xla". None: it serves
        only calls that name it.

    A package registers its backends for good by an entry point of the group "xsake.backends".
    """
    from xsake._op import plugins

    if not name.isidentifier():
        raise ValueError(f"{name=} must be an identifier, such as 'my_kernel'")
    if whose := _taken(name):
        raise ValueError(f"{name=} is {whose}: choose another")
    if before is not None and before not in _BACKENDS:
        raise ValueError(f"{before=} must be None or one of {sorted(_BACKENDS)}")
    plugin = plugins.of_module(name, module)
    if name in _registered and _registered[name][0].origin != plugin.origin:
        raise ValueError(
            f"{name!r} is {_registered[name][0].origin} in this process already, and programs of it may be compiled: "
            f"choose another name than {name!r} for {plugin.origin}, or start a new process"
        )
    _registered[name] = (_registered[name][0] if name in _registered else plugin, before)


def name_of(backend: str) -> str:
    """The name of a backend that is given by its name or by the path of its file.

    A file is registered under its own name, but `__init__.py`, `backend.py` and `kernel.py` under their folder's.
    """
    path = Path(backend)
    if path.suffix != ".py" and "/" not in backend:
        return backend
    if not path.exists():
        raise ValueError(f"there is no file {backend}")
    if path.is_dir() and not (path / "__init__.py").exists():
        raise ValueError(f"{backend} is a folder: give the file of a backend, such as my_kernel/backend.py")
    inner = path.stem in ("__init__", "backend", "kernel") and path.resolve().parent.name.isidentifier()
    name = path.resolve().parent.name if inner else path.stem
    register_backend(name, path)
    return name


def registrations() -> list[tuple[str, str, str | None]]:
    """Arguments of `register_backend` for a process that shall know the same backends."""
    return [(name, plugin.origin, before) for name, (plugin, before) in _registered.items()]


def _plugin(name: str) -> Plugin | None:
    if name in _BACKENDS:
        return None
    return _registered[name][0] if name in _registered else _installed().get(name)


def _installed() -> dict[str, Plugin]:
    """The backends of installed packages whose names are free. Reads the packages' entry points."""
    from xsake._op import plugins

    found = plugins.installed()
    for name in sorted(found):
        if whose := _taken(name):
            _say_once(f"{found[name].source} names a backend {name!r}, which is {whose}: it is not used")
    return {name: plugin for name, plugin in found.items() if not _taken(name)}


def _taken(name: str) -> str | None:
    """Whose name this is, where no backend of another package may have it."""
    if name in _BACKENDS:
        return "XSAKE's own"
    return "a contestant of `xsake race`" if name in CONTESTANTS else None


def names() -> list[str]:
    """All implementations, best first. Reads the entry points of installed packages."""
    return list(dict.fromkeys([*_tried_unasked(), *_registered, *sorted(_installed())]))


def _tried_unasked() -> list[str]:
    """The implementations that a call without a name may get, best first."""
    found = list(_BACKENDS)
    for name, (_, before) in _registered.items():
        if before is not None:
            found.insert(found.index(before), name)
    return found


def source(name: str) -> str | None:
    """The package of a backend that is not XSAKE's own."""
    plugin = _plugin(name)
    return None if plugin is None else plugin.source


def get(name: str) -> Backend:
    plugin = _plugin(name)
    if plugin is None:
        return cast(Backend, importlib.import_module(_BACKENDS[name][0]))
    if plugin.broken:
        raise NotImplementedError(f"implementation={name!r} is not available here: {plugin.broken}")
    return cast(Backend, plugin.module)


def raised_in(name: str, error: BaseException) -> str | None:
    """The innermost line of a backend's own code that led to an error."""
    from xsake._ground import room

    return room.raised_in(room.room_of(cast("ModuleType", get(name)).__name__), error)


def loads(name: str) -> bool:
    """Whether there is such a backend and its module imports, wherever it can run."""
    plugin = _plugin(name)
    return name in _BACKENDS if plugin is None else plugin.broken is None


def _needs(name: str) -> str | None:
    plugin = _plugin(name)
    return _BACKENDS[name][1] if plugin is None else plugin.platform


def unavailable(name: str, platform: str) -> str | None:
    """Why an implementation cannot run on the platform, or None."""
    plugin = _plugin(name)
    if plugin is not None and plugin.broken:
        return plugin.broken
    needs = _needs(name)
    if needs is not None and needs != platform and not interpreting():
        return (
            f"it needs a {needs.upper()}, and this call runs on {platform} (xsake.interpret() runs it slowly anywhere)"
        )
    from xsake._ground import versions

    return versions.lacking().get(name) or _reason(plugin, get(name).unavailable)


def implementations() -> dict[str, str | None]:
    """Every implementation by name: None where it can run in this process, otherwise the reason why not.

    Backends of other packages are among them (`xsake.register_backend`).

    >>> implementations()["xla"] is None
    True
    """
    platform = jax.default_backend()
    return {name: unavailable(name, platform) for name in names()}


def check_name(name: str | None) -> None:
    if name is not None and name not in _BACKENDS and _plugin(name) is None:
        raise ValueError(f"implementation={name!r} is unknown; it must be None or one of {sorted(names())}")


def candidates(name: str | None, platform: str) -> list[str]:
    """The implementations to try, best first: `name`, which must be able to run, or (None) all that can run."""
    check_name(name)
    if name is None:
        reasons = {n: unavailable(n, platform) for n in _tried_unasked()}
        able = [n for n, reason in reasons.items() if reason is None]
        missed = [f"{n!r}: {reason}" for n, reason in reasons.items() if reason and _needs(n) == platform]
        if missed and all(_needs(n) is None for n in able):
            _say_once(f"no kernel serves this {platform.upper()}, so plain XLA does: " + "; ".join(missed))
        return able
    if reason := unavailable(name, platform):
        raise NotImplementedError(f"implementation={name!r} is not available here: {reason}")
    return [name]


@cache
def _say_once(message: str) -> None:
    _logger().warning(message)


def unsupported(name: str, call: Call) -> str | None:
    """Why an implementation cannot serve the call, naming the arguments, or None."""
    backend = get(name)
    unknown = {argument: None for field, argument in call.uses().items() if field not in backend.HONOURS}
    if unknown:
        return f"it does not honour {', '.join(unknown)}"
    return _reason(_plugin(name), backend.unsupported, call)


def _reason(plugin: Plugin | None, question: Callable[..., str | None], *given: Call) -> str | None:
    """A backend's answer. What another package's backend raises is a reason too: it must not end other calls."""
    if plugin is None:
        return question(*given)
    try:
        return question(*given)
    except Exception as error:
        return f"its {question.__name__}() raised {plugin.in_one_line(error)}"


def choose(names: list[str], call: Call) -> str:
    """The first of `names` that supports the call; `Unsupported` if none does.

    Where the best one refuses the size of the mask's blocks, that is said once: other sizes are several times as fast.
    """
    reasons: dict[str, str] = {}
    for name in names:
        reason = unsupported(name, call)
        if reason is None:
            told = [f"{other!r}: {why}" for other, why in reasons.items()]
            if told and ": mask.block_" in told[0]:
                size = f"{call.mask.block_q} x {call.mask.block_kv}"
                _say_once(f"blocks of {size} run on {name!r} and may take several times as long as on {told[0]}")
            _logger().info("attention %s runs on %r%s", call.query.shape, name, "".join(f"; not {r}" for r in told))
            return name
        reasons[name] = reason
    raise Unsupported(reasons)
