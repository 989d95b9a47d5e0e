"""Which backends exist, which can run here, and which one serves a call."""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import cast

import jax

from xsake._ground.trace import interpreting
from xsake.backend.contract import Backend, Call

# name -> (module, platform it needs or None), best first. A module is imported only where its platform is present.
_BACKENDS: dict[str, tuple[str, str | None]] = {
    "mosaic_gpu": ("xsake.kernels_pallas_gpu.hopper.backend", "gpu"),
    "raw_triton": ("xsake.kernels_raw_triton", "gpu"),
    "triton": ("xsake.kernels_pallas_gpu.triton.backend", "gpu"),
    "mosaic_tpu": ("xsake.kernels_pallas_tpu", "tpu"),
    "xla": ("xsake.kernels_xla_ref", None),
}


def _logger() -> logging.Logger:
    logger = logging.getLogger("xsake")
    level = os.environ.get("XSAKE_LOG")
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    return logger


def get(name: str) -> Backend:
    return cast(Backend, importlib.import_module(_BACKENDS[name][0]))


def unavailable(name: str, platform: str) -> str | None:
    """Why an implementation cannot run on the platform, or None."""
    needs = _BACKENDS[name][1]
    if needs is not None and needs != platform and not interpreting():
        return (
            f"it needs a {needs.upper()}, and this call runs on {platform} (xsake.interpret() runs it slowly anywhere)"
        )
    return get(name).unavailable()


def implementations() -> dict[str, str | None]:
    """Every implementation by name: None where it can run in this process, otherwise the reason why not.

    >>> implementations()["xla"] is None
    True
    """
    platform = jax.default_backend()
    return {name: unavailable(name, platform) for name in _BACKENDS}


def check_name(name: str | None) -> None:
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"implementation={name!r} is unknown; it must be None or one of {sorted(_BACKENDS)}")


def candidates(name: str | None, platform: str) -> list[str]:
    """The implementations to try, best first: `name`, which must be able to run, or (None) all that can run."""
    check_name(name)
    if name is None:
        reasons = {n: unavailable(n, platform) for n in _BACKENDS}
        able = [n for n, reason in reasons.items() if reason is None]
        missed = [f"{n!r}: {reason}" for n, reason in reasons.items() if reason and _BACKENDS[n][1] == platform]
        if missed and all(_BACKENDS[n][1] is None for n in able):
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
    return backend.unsupported(call)


def choose(names: list[str], call: Call) -> str:
    """The first of `names` that supports the call; NotImplementedError if none does."""
    reasons: list[str] = []
    for name in names:
        reason = unsupported(name, call)
        if reason is None:
            _logger().info("attention %s runs on %r%s", call.query.shape, name, "".join(f"; not {r}" for r in reasons))
            return name
        reasons.append(f"{name!r}: {reason}")
    raise NotImplementedError("no implementation supports this call: " + "; ".join(reasons))
