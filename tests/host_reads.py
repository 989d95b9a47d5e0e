"""Copies of a device's arrays to the host, noticed where there is no device but the CPU.

There an array lies in the host's memory already, and `jax.transfer_guard` sees no transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax._src.lib import guard_lib


@contextlib.contextmanager
def only_explicit_reads() -> Iterator[None]:
    """Inside the `with` block, reading a `jax.Array` on the host raises RuntimeError, unless by `jax.device_get`."""

    def check(x: Any) -> None:
        if isinstance(x, ArrayImpl) and not guard_lib.thread_local_state().explicit_device_get:
            raise RuntimeError(f"unasked read of {jax.typeof(x)} on the host")

    def checked(convert: Callable) -> Callable:
        def converted(x: Any, *args: Any, **options: Any) -> Any:
            check(x)
            return convert(x, *args, **options)

        return converted

    def value(self: Any) -> np.ndarray:  # what float(x), x.tolist() and JAX's lowering of constants read
        check(self)
        return own(self)

    own = ArrayImpl._value.fget
    # On a CPU, NumPy reads an array through the buffer protocol, which asks no method.
    with (
        mock.patch.object(ArrayImpl, "_value", property(value)),
        mock.patch.object(np, "asarray", checked(np.asarray)),
        mock.patch.object(np, "array", checked(np.array)),
    ):
        yield
