"""The inside of every kernel: a grid step walks its list in chunks of tiles, and transfers run one chunk ahead.

A chunk has `wide` tiles, or `narrow` tiles at the end of a list. Wide chunks hold full blocks only and take no element
test, unless `mixed` or where a full block needs the test too. Other chunks take the test; a chunk with too few tiles
repeats the last one, which the test then removes.

Chunks alternate between two buffers. While one chunk is computed, the next is transferred, be it of this step or the
first of the next step: the pipeline does not drain between rows, heads or batch entries, and a step costs what its list
holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.work import PER_BLOCK, WORDS


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Static sizes of a walk, in tiles. `split`: tiles per block; `exact`: tiles of full blocks need no element test;
    `mixed`: wide chunks take any tiles, and test them.
    """

    wide: int
    narrow: int
    split: int
    exact: bool
    mixed: bool

    @property
    def one_size(self) -> bool:
        """Whether wide and narrow chunks are the same."""
        return self.wide == self.narrow and (self.mixed or not self.exact)


class Stream(NamedTuple):
    """An array that is streamed: `source(place, t, n)` is its tile `t` in HBM for the step at `place`, where `n` has
    the numbers that stand beside the tile's block in the list; `buffer` is [2, wide, ...].
    """

    source: Callable[[Any, Array, tuple[Array, ...]], Any]
    buffer: Any


class Part(NamedTuple):
    """One step's part of the list: its first entry, and how many tiles, wide chunks and chunks in all it has."""

    start: Array
    tiles: Array
    wide: Array
    chunks: Array


class Scratch(NamedTuple):
    """`state`: the number of chunks done so far, and 1 if the transfers of this step's first chunk are under way."""

    state: Any
    window: Any
    window_sem: Any
    sems: Any


def scratch_shapes(window: int, planes: int, streams: int) -> list:
    return [
        pltpu.SMEM((2,), jnp.int32),
        pltpu.SMEM((2, window, planes, LANES), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2, streams)),
    ]


class Walk:
    """One grid step's walk over its list: `run` calls a kernel's function for every chunk."""

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
        elif c.mixed:  # the tiles that are left make a wide chunk if they are more than half of one
            wide = lax.div(tiles + (c.wide // 2 - 1), c.wide)
        else:
            wide = lax.div(full if c.exact else tiles, c.wide)
        narrow = lax.div(jnp.maximum(tiles - wide * c.wide, 0) + (c.narrow - 1), c.narrow)
        return Part(start, tiles, wide, wide + narrow)

    # -- lists ------------------------------------------------------------------------------------------------------

    def _window_copy(self, part: Part, parity: Array) -> Any:
        window = self._scratch.window
        source = self._lists.at[pl.ds(part.start >> 7, window.shape[1])]
        return pltpu.make_async_copy(source, window.at[parity], self._scratch.window_sem.at[parity])

    def _tile_at(self, part: Part, parity: Array, position: Array) -> Array:
        split = self._c.split
        entry, sub = (position, 0) if split == 1 else (lax.div(position, split), lax.rem(position, split))
        at = (part.start & (LANES - 1)) + entry
        return self._scratch.window[parity, at >> 7, 0, at & (LANES - 1)] * split + sub

    def _beside(self, part: Part, parity: Array, position: Array) -> tuple[Array, ...]:
        window = self._scratch.window
        if window.shape[2] == 1:
            return ()
        entry = position if self._c.split == 1 else lax.div(position, self._c.split)
        at = (part.start & (LANES - 1)) + entry
        return tuple(window[parity, at >> 7, plane, at & (LANES - 1)] for plane in range(1, window.shape[2]))

    def tile(self, position: Array) -> Array:
        """The number of this step's tile at a position of its list; past the end, of the last tile."""
        return self._tile_at(self._here, self._parity, jnp.minimum(position, self._here.tiles - 1))

    def live(self, position: Array) -> Array:
        return position < self._here.tiles

    # -- chunks -----------------------------------------------------------------------------------------------------

    def _position(self, part: Part, chunk: Array) -> Array:
        c = self._c
        return jnp.where(chunk < part.wide, chunk * c.wide, part.wide * c.wide + (chunk - part.wide) * c.narrow)

    def _start(self, slot: Array, place: Any, part: Part, parity: Array, chunk: Array) -> None:
        position, is_wide = self._position(part, chunk), chunk < part.wide

        def start(count: int) -> None:
            places = [jnp.minimum(position + e, part.tiles - 1) for e in range(count)]
            tiles = [(self._tile_at(part, parity, p), self._beside(part, parity, p)) for p in places]
            for e, (tile, beside) in enumerate(tiles):
                for s, stream in enumerate(self._streams):
                    pltpu.make_async_copy(
                        stream.source(place, tile, beside), stream.buffer.at[slot, e], self._scratch.sems.at[slot, s]
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
        """Calls compute(slot, position, tiles, tested) for every chunk of this step, in order."""
        c, state, here, after = self._c, self._scratch.state, self._here, self._next
        parity = self._parity
        has_next = self._step + 1 < self._steps

        @pl.when(self._step == 0)
        def _():
            state[0] = 0
            state[1] = 0
            self._window_copy(here, parity).start()

        @pl.when(state[1] == 0)  # the first step, and a step after an empty one
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
