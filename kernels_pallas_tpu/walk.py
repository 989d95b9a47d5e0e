"""The inside of every kernel: a step's list, walked in chunks of tiles that are brought one chunk ahead.

A chunk is `wide` tiles, or `narrow` for what is left. Wide chunks hold full blocks only (where fullness is exact) and
take no element test, unless `mixed`; other chunks test, and repeat their last tile where they have fewer than they
hold, which the test removes. Chunks alternate between two buffers. While one is computed the next is on its way, be it
of this step or the first of the next step: the pipeline does not drain between rows, heads or batches, and a step
costs what its list holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels_pallas_tpu.tiles import LANES
from xsake.kernels_pallas_tpu.work import PER_BLOCK, WORDS


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Static sizes of a walk. `exact`: full tiles need no test; `mixed`: wide chunks take any tiles, and test."""

    wide: int
    narrow: int
    split: int
    exact: bool
    mixed: bool

    @property
    def one_size(self) -> bool:
        """Wide chunks would be narrow ones."""
        return self.wide == self.narrow and (self.mixed or not self.exact)


class Stream(NamedTuple):
    """An array that a chunk needs: where tile `t` of the step at `place` lies in HBM, and its buffer [2, wide, ...]."""

    source: Callable[[Any, Array], Any]
    buffer: Any


class Part(NamedTuple):
    """One step's part of the list: offset of its first entry in the window, tiles, wide chunks and chunks in all."""

    start: Array
    tiles: Array
    wide: Array
    chunks: Array


class Scratch(NamedTuple):
    """`state`: chunks done so far, and whether this step's first chunk is already on its way."""

    state: Any
    window: Any
    window_sem: Any
    sems: Any


def scratch_shapes(window: int, streams: int) -> list:
    return [
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SMEM((2, window, 1, LANES), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2, streams)),
    ]


class Walk:
    """Made at the top of a kernel body; `run` then calls the body's chunk function."""

    def __init__(
        self,
        chunks: Chunks,
        step: Array,
        steps: int,
        records: Any,
        lists: Any,
        scratch: Scratch,
        streams: Sequence[Stream],
    ):
        self._c, self._step, self._steps, self._lists = chunks, step, steps, lists
        self._scratch, self._streams = scratch, streams
        at = (step & (PER_BLOCK - 1)) * WORDS
        self._here = self._part(*(records[0, 0, at + k] for k in range(3)))
        self._next = self._part(*(records[0, 0, at + 3 + k] for k in range(3)))
        self._parity = step & 1

    def _part(self, start: Array, tiles: Array, full: Array) -> Part:
        c = self._c
        if c.one_size:
            wide = jnp.int32(0)
        elif c.mixed:  # one more wide chunk, not quite filled, if more than half of it is left
            wide = lax.div(tiles + (c.wide // 2 - 1), c.wide)
        else:
            wide = lax.div(full if c.exact else tiles, c.wide)
        narrow = lax.div(jnp.maximum(tiles - wide * c.wide, 0) + (c.narrow - 1), c.narrow)
        return Part(start, tiles, wide, wide + narrow)

    # Lists

    def _window_copy(self, part: Part, parity: Array) -> Any:
        window = self._scratch.window
        source = self._lists.at[pl.ds(part.start >> 7, window.shape[1])]
        return pltpu.make_async_copy(source, window.at[parity], self._scratch.window_sem.at[parity])

    def _tile_at(self, part: Part, parity: Array, position: Array) -> Array:
        split = self._c.split
        entry, sub = (position, 0) if split == 1 else (lax.div(position, split), lax.rem(position, split))
        at = (part.start & (LANES - 1)) + entry
        return self._scratch.window[parity, at >> 7, 0, at & (LANES - 1)] * split + sub

    def tile(self, position: Array) -> Array:
        """The number of this step's tile at a position; past the end, the last one's."""
        return self._tile_at(self._here, self._parity, jnp.minimum(position, self._here.tiles - 1))

    def live(self, position: Array) -> Array:
        return position < self._here.tiles

    # Chunks

    def _position(self, part: Part, chunk: Array) -> Array:
        c = self._c
        return jnp.where(chunk < part.wide, chunk * c.wide, part.wide * c.wide + (chunk - part.wide) * c.narrow)

    def _start(self, slot: Array, place: Any, part: Part, parity: Array, chunk: Array) -> None:
        position, is_wide = self._position(part, chunk), chunk < part.wide

        def start(count: int) -> None:
            tiles = [self._tile_at(part, parity, jnp.minimum(position + e, part.tiles - 1)) for e in range(count)]
            for e, tile in enumerate(tiles):
                for s, stream in enumerate(self._streams):
                    pltpu.make_async_copy(
                        stream.source(place, tile), stream.buffer.at[slot, e], self._scratch.sems.at[slot, s]
                    ).start()

        if self._c.wide == self._c.narrow:
            start(self._c.wide)
        else:
            pl.when(is_wide)(lambda: start(self._c.wide))
            pl.when(jnp.logical_not(is_wide))(lambda: start(self._c.narrow))

    def _wait(self, slot: Array, count: int) -> None:
        for s, stream in enumerate(self._streams):
            arrived = stream.buffer.at[slot, pl.ds(0, count)]
            pltpu.make_async_copy(arrived, arrived, self._scratch.sems.at[slot, s]).wait()

    def run(self, place: Any, next_place: Any, compute: Callable[[Array, Array, int, bool], None]) -> None:
        """compute(slot, position, tiles, tested) for every chunk of this step, in order."""
        c, state, here, after = self._c, self._scratch.state, self._here, self._next
        parity = self._parity
        has_next = self._step + 1 < self._steps

        @pl.when(self._step == 0)
        def _():
            state[0] = 0
            state[1] = 0
            self._window_copy(here, parity).start()

        @pl.when(state[1] == 0)  # the first step, or one after an empty one
        def _():
            self._window_copy(here, parity).wait()
            pl.when(here.tiles > 0)(lambda: self._start(state[0] & 1, place, here, parity, jnp.int32(0)))

        state[1] = 0
        pl.when(has_next)(lambda: self._window_copy(after, 1 - parity).start())

        def chunk(n: Array, count: int, tested: bool) -> None:
            done = state[0]
            slot = done & 1
            state[0] = done + 1
            is_last = n + 1 == here.chunks

            @pl.when(is_last & has_next)
            def _():
                self._window_copy(after, 1 - parity).wait()
                state[1] = 1

            ahead = Part(*(jnp.where(is_last, b, a) for a, b in zip(here, after, strict=True)))
            where = tuple(jnp.where(is_last, b, a) for a, b in zip(place, next_place, strict=True))

            @pl.when(jnp.logical_not(is_last) | (has_next & (after.tiles > 0)))
            def _():
                self._start(
                    1 - slot, where, ahead, jnp.where(is_last, 1 - parity, parity), jnp.where(is_last, 0, n + 1)
                )

            self._wait(slot, count)
            compute(slot, self._position(here, n), count, tested)

        def wide(n: Array, _: Any) -> Any:
            chunk(n, c.wide, c.mixed or not c.exact)
            return _

        def narrow(n: Array, _: Any) -> Any:
            chunk(n, c.narrow, True)
            return _

        if not c.one_size:
            lax.fori_loop(0, here.wide, wide, None)
        lax.fori_loop(here.wide, here.chunks, narrow, None)
