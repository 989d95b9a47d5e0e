"""How every TPU kernel is called: operands by name, the lists and scratch of the walk, interpretation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake._ground.trace import interpreting
from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import VMEM_LIMIT
from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.walk import Chunks, Scratch, Stream, Walk, scratch_shapes
from xsake.kernels_pallas_tpu.work import PER_BLOCK, Work

HBM = pl.BlockSpec(memory_space=pltpu.HBM)
# Tests replace it by an interpreter that detects races, which takes time, or by Pallas' plain interpreter (True), which
# has no effects.
interpreter: Any = pltpu.InterpretParams()


class Refs:
    """Operands and scratch of a kernel by name. An operand that the call does not have has no name here."""

    def __init__(self, names: Sequence[str], refs: Sequence[Any]):
        self._refs = dict(zip(names, refs, strict=True))
        if len(self._refs) != len(names):
            raise ValueError(f"operands and scratch of a kernel must have different names; got {list(names)}")

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    def __getattr__(self, name: str) -> Any:
        refs = vars(self)["_refs"]
        if name not in refs:
            raise AttributeError(f"this kernel has no operand or scratch named {name!r}; it has {sorted(refs)}")
        return refs[name]


def grid_places(*sizes: int) -> list[np.ndarray]:
    """The coordinates of every grid step, in the order of the grid."""
    return [x.reshape(-1) for x in np.indices(sizes)]


def successor(ids: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """The coordinates of the next grid step."""
    out: list[Array] = []
    carry: Any = True
    for i, n in zip(reversed(ids), reversed(sizes), strict=True):
        up = jnp.where(carry, i + 1, i)
        carry = up == n
        out.append(jnp.where(carry, 0, up))
    return out[::-1]


def listed_elements(call: Call) -> int:
    """Elements of the logits in all listed blocks, by the capacity of the lists."""
    mask = call.mask
    return call.batch * call.q_heads * mask.capacity * mask.block_q * mask.block_kv


def launch(
    body: Callable[[Refs, Walk, list[Array], list[Array]], None],
    *,
    name: str,
    call: Call,
    grid: tuple[int, ...],
    work: Work,
    chunks: Chunks,
    inputs: dict[str, tuple[Array, pl.BlockSpec] | None],
    streams: dict[str, tuple[Array, Callable[[Any, Any, Array, Any], Any]] | None],
    outputs: dict[str, tuple[tuple[int, ...], Any, pl.BlockSpec]],
    scratch: dict[str, Any],
    flops: int,
) -> tuple[Array, ...]:
    """Calls body(refs, walk, this step's coordinates, the next step's) for every step of the grid.

    `inputs` and `outputs` are blocked by their specs. `streams` are arrays in HBM with a function (ref, place, t, n)
    that picks tile t, beside whose block the list has the numbers n, for the step at `place`; the walk brings such
    tiles into buffers. What is None is left out.
    """
    given = {k: v for k, v in inputs.items() if v is not None}
    flowing = {k: v for k, v in streams.items() if v is not None}
    buffers = {}
    for k, (array, pick) in flowing.items():
        tile = jax.eval_shape(lambda x, pick=pick: pick(_Shape(x), (0,) * len(grid), 0, (0, 0)), array)
        buffers[k + "_buffer"] = pltpu.VMEM((2, chunks.wide, *tile.shape), tile.dtype)
    steps = int(np.prod(grid))
    names = [
        "records",
        "lists",
        *given,
        *flowing,
        *outputs,
        *scratch,
        *buffers,
        "state",
        "window",
        "window_sem",
        "sems",
    ]

    def record_block(*ids: Array) -> tuple:
        return (_linear(ids, grid) >> PER_BLOCK.bit_length() - 1, 0, 0)

    def kernel(*all_refs: Any) -> None:
        refs = Refs(names, all_refs)
        ids = [pl.program_id(a) for a in range(len(grid))]
        flows = [_stream(refs, k, pick) for k, (_, pick) in flowing.items()]
        own = Scratch(refs.state, refs.window, refs.window_sem, refs.sems)
        walk = Walk(chunks, _linear(ids, grid), steps, refs.records, refs.lists, own, flows)
        body(refs, walk, ids, successor(ids, grid))

    result = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((1, 1, LANES), record_block, memory_space=pltpu.SMEM),
            HBM,
            *(spec for _, spec in given.values()),
            *(HBM for _ in flowing),
        ],
        out_specs=[spec for _, _, spec in outputs.values()],
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(call.query).manual_axis_type)
            for shape, dtype, _ in outputs.values()
        ],
        scratch_shapes=[
            *scratch.values(),
            *buffers.values(),
            *scratch_shapes(work.window, work.lists.shape[1], len(flowing)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.GridDimensionSemantics.ARBITRARY] * len(grid),
            disable_bounds_checks=True,  # indices are clamped; the checks cost 20 cycles per transfer
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=flops // 256, bytes_accessed=flops // 256),
        interpret=interpreter if interpreting() else False,
        name=name,
    )(work.records, _in_hbm(work.lists), *(x for x, _ in given.values()), *(_in_hbm(x) for x, _ in flowing.values()))
    return tuple(result)


def _stream(refs: Refs, name: str, pick: Callable[[Any, Any, Any, Any], Any]) -> Stream:
    source = getattr(refs, name)
    return Stream(lambda place, tile, n: pick(source, place, tile, n), getattr(refs, name + "_buffer"))


def _in_hbm(x: Array) -> Array:
    """x, kept in HBM. XLA would place small arrays in VMEM, where a transfer is a loop of vector copies, not a DMA."""
    return x if interpreting() else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def _linear(ids: Sequence[Any], sizes: Sequence[int]) -> Any:
    at: Any = jnp.int32(0)
    for i, n in zip(ids, sizes, strict=True):
        at = at * n + i
    return at


class _Shape:
    """Stands for a ref, to find the shape of a picked tile."""

    def __init__(self, array: Array):
        self.at = self
        self._array = array

    def bitcast(self, dtype: Any) -> _Shape:
        """To a type of twice as many bits."""
        *rest, rows, columns = self._array.shape
        return _Shape(jnp.zeros((*rest, rows // 2, columns), dtype))

    def __getitem__(self, index: Any) -> Array:
        index = tuple(slice(0, i.size) if isinstance(i, pl.Slice) else i for i in index)
        return self._array[index]
