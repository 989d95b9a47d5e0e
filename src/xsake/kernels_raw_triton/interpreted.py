"""The kernels in Triton's own interpreter, on the host: for tests and for debugging.

Triton decides when a kernel is defined whether it will be interpreted: TRITON_INTERPRET=1 must be set before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from jax import Array
from triton.runtime import interpreter

from xsake.kernels_raw_triton.facts import Facts

_PATCH_LANGUAGE = interpreter._patch_lang


class _HostArray:
    """A numpy array with the few names of a tensor that the interpreter asks for."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _HostArray:
        return self

    def cpu(self) -> _HostArray:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _HostArray:
        return _HostArray(self.array)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def set_(self, storage: _HostArray, *_: Any) -> None:
        self.array = storage.array

    def copy_(self, other: _HostArray) -> None:
        """The interpreter wrote into the array itself."""


def run(kernel: Any, arrays: list, shapes: Sequence[Any], grid: int, facts: Facts) -> Sequence[Array]:
    """The interpreter cannot multiply bfloat16: such arrays are float32 inside, and rounded at the end."""

    def on_host(*given: Any) -> list[np.ndarray]:
        outputs = [np.empty(x.shape, _wide(x.dtype)) for x in shapes]
        inputs = [np.ascontiguousarray(x, dtype=_wide(x.dtype)) for x in given]
        with warnings.catch_warnings(), mock.patch.object(interpreter, "_patch_lang", _patch_once()):
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities and NaN
            kernel[(grid, 1, 1)](*map(_HostArray, (*inputs, *outputs)), F=facts)
        return [x.astype(shape.dtype) for x, shape in zip(outputs, shapes, strict=True)]

    return jax.pure_callback(on_host, list(shapes), *arrays)


def _wide(dtype: Any) -> Any:
    return jnp.float32 if dtype == jnp.bfloat16 else dtype


def _patch_once() -> Callable[[Any], Any]:
    """How Triton changes its language while a kernel runs, but once per module and not at every call of a function.

    It also makes the bounds of loops from arrays in a way that numpy 2.4 does not allow any more.
    """
    whole = interpreter._LangPatchScope()  # of all modules: the kernel's end restores it
    seen: set[int] = set()

    def patch(function: Any) -> Any:
        if id(function.__globals__) not in seen:
            seen.add(id(function.__globals__))
            whole._changes += _PATCH_LANGUAGE(function)._changes
            whole.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
        return whole

    return patch
