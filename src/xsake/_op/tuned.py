"""The configuration of a call that gives none: per direction, a tuned entry of a database, or else the heuristic's."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import typing
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from xsake import tuning_db
from xsake._ground.buckets import density_bucket
from xsake._ground.device import device_kind
from xsake._ground.fields import from_stored, hints
from xsake._op import registry
from xsake.backend.contract import Backend, Call
from xsake.hads.mask.block_mask import BlockMask
from xsake.tuning_db import Found, Key

_log = logging.getLogger("xsake")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A configuration, and for each of its directions the entry it came from (None: the heuristic)."""

    config: Any
    found: dict[str, Found | None]


def choose(name: str, call: Call) -> Choice:
    """Look the call up in the databases: while tracing, never in a compiled call."""
    backend = registry.get(name)
    config, found = backend.default_config(call), {}
    for direction in directions(backend):
        entry = tuning_db.find(device_kind(call.query), key_of(name, call, direction))
        tuned = _with_part(backend, call, config, direction, entry) if entry else None
        found[direction] = entry if tuned else None
        config = tuned or config
        if entry and tuned:
            _tell(name, direction, entry)
    return Choice(config, found)


def _with_part(backend: Backend, call: Call, config: Any, direction: str, found: Found) -> Any | None:
    """`config` with one direction from the entry; None, after a warning, if the entry does not suit backend or call."""
    try:
        tuned = dataclasses.replace(config, **{direction: make_part(backend, direction, found.entry.config)})
        problem = backend.misfit(call, tuned)
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is None:
        return tuned
    tuning_db.lookup.warn_once(f"tuned configuration ignored ({found}), {found.entry.key}: {problem}")
    return None


def _tell(name: str, direction: str, found: Found) -> None:
    if not found.exact:
        _log.info("attention %s on %r: tuned configuration of the nearest entry (%s)", direction, name, found)
    if _log.isEnabledFor(logging.INFO) and found.entry.about.get("kernel") != kernel_hash(name):
        _tell_stale(name, found.origin)


@cache
def _tell_stale(name: str, origin: str) -> None:
    """Log once: a changed kernel makes all of its entries stale at once, and stale entries are still the best guess."""
    _log.info(
        "%s tuning entries for %r are stale: its kernels changed since (xsake autotune renews them)", origin, name
    )


def directions(backend: Backend) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(backend.Config))


def make_part(backend: Backend, direction: str, values: Any) -> Any:
    """One direction's configuration from stored values."""
    return from_stored(hints(backend.Config)[direction], values)


def key_of(name: str, call: Call, direction: str) -> Key:
    return Key.of(
        implementation=name,
        direction=direction,
        dtype=call.query.dtype.name,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        group=call.q_heads // call.kv_heads,
        block_q=call.mask.block_q,
        block_kv=call.mask.block_kv,
        causal=call.band.right == 0,
        q_len=call.q_len,
        kv_len=call.kv_reach,
        heads=call.batch * call.q_heads,
        density=_density(call.mask),
    )


def _density(mask: BlockMask) -> float | None:
    """The mask's density hint. Without one, the density at full capacity if that is below `UNKNOWN_DENSITY`."""
    if mask.density_hint is None and density_bucket(mask.most_density) < tuning_db.UNKNOWN_DENSITY:
        return mask.most_density
    return mask.density_hint


@cache
def kernel_hash(name: str) -> str:
    """The hash of an implementation's code."""
    from xsake._op import kernel_hash as of_code  # calls need none

    return of_code.kernel_hash(typing.cast(ModuleType, registry.get(name)))


# -- who listens -----------------------------------------------------------------------------------------------------

_listeners: contextvars.ContextVar[tuple[Callable[[str, Call], None], ...]] = contextvars.ContextVar(
    "xsake_calls", default=()
)


@contextlib.contextmanager
def listening(listener: Callable[[str, Call], None]) -> Iterator[None]:
    """Inside the `with` block, `listener(implementation, call)` is called for every call that is traced."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def announce(name: str, call: Call) -> None:
    for listener in _listeners.get():
        listener(name, call)
