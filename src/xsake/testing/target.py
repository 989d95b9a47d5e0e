"""`Target`: an implementation to be checked, and the sizes of calls that suit it."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp

import xsake
from xsake._op import registry
from xsake._op.arguments import build_call

_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = ((24, 16), (64, 64), (128, 128))  # (head_dim, value_dim), the first to be tried first


@dataclasses.dataclass(frozen=True)
class Target:
    """An implementation and the sizes to check it at.

    Checks speak of small sizes (blocks of 16 and 32 tokens, about 100 tokens); `unit` multiplies them where a kernel
    needs larger blocks. `head_dim` and `value_dim` are those of most calls. `interpret` runs the kernels of an
    accelerator on a CPU.
    """

    name: str
    interpret: bool = False
    dtypes: tuple[str, ...] = _DTYPES
    unit: int = 1
    head_dim: int = 24
    value_dim: int = 16

    def size(self, tokens: int) -> int:
        return tokens * self.unit

    def context(self) -> contextlib.AbstractContextManager:
        return xsake.interpret() if self.interpret else contextlib.nullcontext()


def target_of(name: str) -> Target:
    """The sizes and precisions of the smallest calls that a backend supports.

    The backend is interpreted where its kernels cannot run here otherwise. NotImplementedError where it is not
    available, or supports none of the calls that are tried.
    """
    registry.check_name(name)
    interpret = registry.unavailable(name, jax.default_backend()) is not None
    if interpret:
        with xsake.interpret():
            reason = registry.unavailable(name, jax.default_backend())
        if reason is not None:
            raise NotImplementedError(f"implementation={name!r} is not available here: {reason}")
    for unit in (1, 2, 4, 8):
        for head_dim, value_dim in _SIZES:
            found = Target(name, interpret, (), unit, head_dim, value_dim)
            reasons = {dtype: _refusal(found, dtype) for dtype in _DTYPES}
            if dtypes := tuple(dtype for dtype in _DTYPES if reasons[dtype] is None):
                return dataclasses.replace(found, dtypes=dtypes)
    raise NotImplementedError(f"{name!r} supports no call that was tried; the last: {reasons[_DTYPES[-1]]}")


def _refusal(target: Target, dtype: str) -> str | None:
    """Why the backend supports no call of the target's sizes with a mask of several blocks, causal or not, or None."""
    length, block = target.size(75), target.size(16)
    query, key, value = (
        jnp.zeros((1, length, heads, dim), dtype)
        for heads, dim in ((4, target.head_dim), (2, target.head_dim), (2, target.value_dim))
    )
    reasons = []
    with target.context():
        for pattern in (xsake.patterns.causal, xsake.patterns.dense):
            mask = pattern(length, length, block_q=block, block_kv=2 * block)
            call = build_call(query, key, value, mask, default_blocks=(block, block))
            reasons.append(registry.unsupported(target.name, call))
    return None if None in reasons else reasons[0]
