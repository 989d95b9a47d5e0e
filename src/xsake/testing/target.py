"""`Target`: an implementation to be checked, and the sizes of calls that suit it."""

from __future__ import annotations

import contextlib
import dataclasses

import xsake


@dataclasses.dataclass(frozen=True)
class Target:
    """An implementation and the sizes to check it at.

    Checks speak of small sizes (blocks of 16 and 32 tokens, about 100 tokens); `unit` multiplies them where a kernel
    needs larger blocks. `head_dim` and `value_dim` are those of most calls. `interpret` runs the kernels of an
    accelerator on a CPU.
    """

    name: str
    interpret: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    unit: int = 1
    head_dim: int = 24
    value_dim: int = 16

    def size(self, tokens: int) -> int:
        return tokens * self.unit

    def context(self) -> contextlib.AbstractContextManager:
        return xsake.interpret() if self.interpret else contextlib.nullcontext()
