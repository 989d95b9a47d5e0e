"""The smallest call that shows what a check found, as code to paste."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

import xsake
from xsake._op import registry
from xsake.testing.case import Case
from xsake.testing.checks import Check
from xsake.testing.target import Target

SECONDS = 10.0  # to look for a call
_TIMES = 4  # a call is repeated where its results are to differ
_GRADIENT_OF = {"d_query": 0, "d_key": 1, "d_value": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    dtype: str

    @property
    def arrays(self) -> str:
        """Code that makes query, key and value."""
        shapes = [
            (1, self.q_len, self.q_heads, self.head_dim),
            (1, self.kv_len, self.kv_heads, self.head_dim),
            (1, self.kv_len, self.kv_heads, self.value_dim),
        ]
        if len(set(shapes)) == 1:
            return f"q, k, v = {self.normal('0', (3, *shapes[0]))}"
        return f"q, k, v = ({self.normal('i', 's')} for i, s in enumerate({shapes}))"

    def normal(self, key: str, shape: object) -> str:
        of = "" if self.dtype == "float32" else f", {self.dtype!r}"
        return f"jax.random.normal(jax.random.key({key}), {shape}{of})"


def code(target: Target, check: Check, results: Sequence[str], *, again: bool = False) -> str:
    """The first of a few calls, small ones first, whose result differs from the XLA backend's, or, with `again`, from
    that of the same call; else the check itself.
    """
    case, deadline = check.case(target), time.monotonic() + SECONDS
    ours = f"f({target.name!r})"
    shows = f"max(abs({ours} - {ours}).max() for _ in range({_TIMES}))" if again else f"abs({ours} - f('xla')).max()"
    for result in results if again or target.name != "xla" else ():
        for lines in _calls(target, case, result):
            if time.monotonic() > deadline:
                break
            if (shown := _difference(lines, target, again)) is not None:
                return _text(target, [*lines, f"print({shows})  # {shown}"])
    return by_title(target, check)


def by_title(target: Target, check: Check) -> str:
    """The check itself."""
    lines = ["from xsake.testing import CHECKS, target_of", f'CHECKS["{check.title}"].run(target_of("{target.name}"))']
    return "\n".join(filter(None, ["import xsake", _registering(target), *lines]))


def _text(target: Target, lines: list[str]) -> str:
    if target.interpret:
        lines = [*lines[:-1], f"with xsake.interpret(): {lines[-1]}"]
    return "\n".join(filter(None, ["import jax, xsake", _registering(target), *lines])).replace("'", '"')


def _registering(target: Target) -> str:
    origins = {name: origin for name, origin, _ in registry.registrations()}
    origin = origins.get(target.name)
    return f'xsake.register_backend("{target.name}", "{origin}")' if origin else ""


def _calls(target: Target, case: Case, result: str) -> Iterator[tuple[str, str]]:
    """Two lines of code per call: the arrays, and a function of the implementation's name."""
    own = Sizes(
        q_len=case.query.shape[1],
        kv_len=case.key.shape[1],
        q_heads=case.query.shape[2],
        kv_heads=case.key.shape[2],
        head_dim=case.query.shape[3],
        value_dim=case.value.shape[3],
        block_q=case.block_q,
        block_kv=case.block_kv,
        dtype=case.query.dtype.name,
    )
    length, dim = target.size(16), max(own.head_dim, own.value_dim)
    one: dict[str, Any] = dict(q_heads=1, kv_heads=1, head_dim=dim, value_dim=dim)
    grouped = dataclasses.replace(own, q_len=length, kv_len=length)
    tried = [
        dataclasses.replace(own, q_len=length, kv_len=length, **one),
        dataclasses.replace(own, q_len=3 * length, kv_len=3 * length, **one),
        *([grouped] if own.q_heads > 1 or own.head_dim != own.value_dim else []),
        own,
    ]
    tried = [*(dataclasses.replace(sizes, dtype=target.dtypes[0]) for sizes in tried[:2]), *tried]
    for sizes in dict.fromkeys(tried):
        features = _features(case, sizes)
        choices = [(), *((feature,) for feature in features), tuple(features)]
        for chosen in dict.fromkeys(choices):
            for which in (0, 1) if result in _GRADIENT_OF or result == "d_sinks" else (int(result == "lse"),):
                yield sizes.arrays, _function(chosen, result, which)


def _function(features: tuple[str, ...], result: str, which: int) -> str:
    """`f(implementation)`: a result of the call, or the gradient of the sum of its output or lse."""
    arguments = ", ".join(["q, k, v", *features, "implementation=i"] + (["return_lse=True"] if which else []))
    call = f"xsake.attention({arguments})" + ("[1]" if which else "")
    if result in _GRADIENT_OF:
        return f"f = lambda i: jax.grad(lambda q, k, v: {call}.sum(), {_GRADIENT_OF[result]})(q, k, v)"
    if result in ("d_bias", "d_sinks") and (given := _argument(features, result.removeprefix("d_"))):
        name, value = given
        call = call.replace(f"{name}={value}", f"{name}={name}")
        return f"f = lambda i: jax.grad(lambda {name}: {call}.sum())({value})"
    return f"f = lambda i: {call}"


def _argument(features: tuple[str, ...], name: str) -> tuple[str, str] | None:
    return next(((name, f.partition("=")[2]) for f in features if f.startswith(f"{name}=")), None)


def _features(case: Case, sizes: Sizes) -> list[str]:
    """The arguments of a case, as code for calls of these sizes."""
    t, s, given = sizes.q_len, sizes.kv_len, case.arguments
    found = []
    if case.blocks is not None:
        found.append(_mask(case, sizes))
    for name in ("is_causal", "scale", "logits_soft_cap"):
        if given.get(name) not in (None, False):
            found.append(f"{name}={given[name]!r}")
    if given.get("local_window_size") is not None:
        found.append(f"local_window_size={_within(given['local_window_size'], t)}")
    if given.get("bias") is not None:
        found.append(f"bias={sizes.normal('3', (1, 1, t, s))}")
    if given.get("sinks") is not None:
        found.append(f"sinks=jax.numpy.arange({sizes.q_heads}.0)")
    if given.get("segment_ids") is not None:
        ids = [f"jax.numpy.arange({n})[None] // 7" for n in (t, s)]
        found.append(f"segment_ids=({ids[0]}, {ids[1]})")
    if given.get("positions") is not None:
        at = [f"jax.numpy.arange({n})[None, ::-1]" for n in (t, s)]
        found.append(f"positions=({at[0]}, {at[1]})")
    for name, n in (("query_seq_lengths", t), ("key_value_seq_lengths", s)):
        if given.get(name) is not None:
            found.append(f"{name}=jax.numpy.array([{max(1, n - 5)}])")
    return found


def _within(window: Any, length: int) -> Any:
    """The window, but narrower than a call of this length."""
    if isinstance(window, tuple):
        return tuple(_within(side, length) for side in window)
    return window if window is None else min(window, length // 2 - 1)


def _mask(case: Case, sizes: Sizes) -> str:
    rows, columns = -(-sizes.q_len // sizes.block_q), -(-sizes.kv_len // sizes.block_kv)
    heads = sizes.q_heads if case.blocks.shape[1] > 1 else 1
    full = case.blocks.all()
    blocks = f"jax.{'numpy.ones' if full else 'random.bernoulli'}"
    shape = (1, heads, rows, columns)
    blocks += f"({shape}, bool)" if full else f"(jax.random.key(1), 0.5, {shape})"
    rule = "".join(
        f", {name}={value!r}"
        for name, value in (
            ("is_causal", case.mask_causal),
            ("local_window_size", _within(case.mask_window, sizes.q_len)),
        )
        if value not in (None, False)
    )
    of = ", ".join(f"{name}={getattr(sizes, name)}" for name in ("block_q", "block_kv", "q_len", "kv_len"))
    return f"mask=xsake.BlockMask.from_blocks({blocks}, {of}{rule})"


@cache
def _difference(lines: tuple[str, str], target: Target, again: bool) -> str | None:
    """How far the implementation is from the XLA backend in such a call, or what it raises; None where it is no further
    away than rounding, or the call is not possible. With `again`: how far it is from its own results.
    """
    names: dict[str, Any] = {"jax": jax, "xsake": xsake}
    try:
        exec("\n".join(lines), names)
        wanted = names["f"]("xla")
    except Exception:
        return None
    try:
        with target.context():
            runs = [np.asarray(names["f"](target.name), np.float64) for _ in range(2 * _TIMES if again else 1)]
    except NotImplementedError:
        return None
    except Exception as error:
        return type(error).__name__
    if again:
        apart = max(_apart(one, other) for one, other in itertools.batched(runs, 2))
        return f"{apart:.3g}" if apart else None
    eps, wanted = float(jax.numpy.finfo(wanted.dtype).eps), np.asarray(wanted, np.float64)
    apart = _apart(runs[0], wanted)
    largest = np.abs(np.where(np.isfinite(wanted), wanted, 0.0)).max()
    allowed = (64 if eps < 1e-5 else 4) * eps * max(1.0, largest)
    return None if apart <= allowed else f"{apart:.3g}"


def _apart(found: np.ndarray, wanted: np.ndarray) -> float:
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    return float(np.where(same, 0.0, np.abs(found - wanted)).max())
