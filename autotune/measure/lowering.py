"""Programs lowered in child processes: lowering is Python, so that the threads of one process do it one by one.

A child has no GPU. The child traces a program for the GPU of its parent and exports it; the parent then runs XLA's
and Mosaic's compilers in threads.
"""

from __future__ import annotations

import queue
from typing import Any

import jax
from jax import export

from xsake._ground.device import Gpu, lowering_for
from xsake._measure.isolation import Service, Worker
from xsake.autotune.measure.program import Program

MOST_CHILDREN = 8  # of about 400 MB each
_LIMIT = 30.0  # seconds for one program
# JAX exports Triton's kernels only on request: another version of JAX might not read them.
_SAME_VERSION = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]


class Lowering:
    """`children` processes that lower programs for `gpu`, or for the CPU where `gpu` is None. Threads may share it."""

    def __init__(self, gpu: Gpu | None, children: int) -> None:
        self._gpu, self._children = gpu, [Worker(Exporter) for _ in range(children)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)

    def lower(self, program: Program, arguments: tuple) -> jax.stages.Lowered:
        """The same as `program.function().lower(*arguments)`.

        Raises `isolation.Failed` if the program cannot be exported, or if the child hangs or dies.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        child = self._idle.get()
        try:
            found = export.deserialize(child.call("export", program, shapes, self._gpu, limit=_LIMIT))
        finally:
            self._idle.put(child)
        return jax.jit(lambda *arguments: found.call(*jax.tree.leaves(arguments))).lower(*arguments)

    def close(self) -> None:
        for child in self._children:
            child.close()


class Exporter(Service):
    """The service in a child. The child must not open the GPU, which takes memory and disturbs races."""

    def __init__(self) -> None:
        jax.config.update("jax_platforms", "cpu")

    def export(self, program: Program, shapes: tuple, gpu: Gpu | None) -> bytearray:
        if gpu is None:
            return exported(program, shapes, "cpu").serialize()
        with lowering_for(gpu):
            return exported(program, shapes, "cuda").serialize()


def exported(program: Program, shapes: tuple, platform: str) -> export.Exported:
    """The program as a function of the leaves of its arguments, since `jax.export` does not know `Call`."""
    leaves, tree = jax.tree.flatten(shapes)

    def of_leaves(*leaves: Any) -> Any:
        return program.function()(*jax.tree.unflatten(tree, leaves))

    return export.export(jax.jit(of_leaves), platforms=(platform,), disabled_checks=_SAME_VERSION)(*leaves)
