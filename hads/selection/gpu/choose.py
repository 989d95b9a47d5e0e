"""`selection.choice` as GPU kernels: a row stays in registers from its logits to its sorted gains.

One kernel takes a row's logits to masses, sorts them and writes every block's gain in falling order of mass. Then the
largest cut that enough blocks reach is found six bits at a time: rows are sorted, so a binary search counts a row's
blocks above a cut, and 63 cuts are searched at once. Counts are added up in integers, so that every run agrees. The
chunks of a prompt are so short that launches cost more than the work: between the kernels XLA has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Bool, Float, Int

from xsake.hads.mask.lists.triton_call import TILE, iota, triton_call, whole
from xsake.hads.selection.cut import TOGETHER, Cut, kept_per_row
from xsake.hads.selection.gain import gains_of_sorted, key_of
from xsake.hads.selection.gpu.sort import sort_rows
from xsake.hads.selection.rows import Rows

_TWO_ROWS = 512  # blocks per row up to which a program sorts two rows
_SORT_WARPS, _CUT_WARPS, _KEPT_WARPS, _LIST_WARPS = 4, 8, 8, 4
_LIST_ENTRIES = 2048  # blocks per program
_SEARCHED_ROWS = 16  # per program: a chunk's few rows keep the whole chip busy
_DIGIT = 6  # bits of the cut that one pass finds
_CUTS = 1 << _DIGIT
_PASSES = 4
_DROPPED = 31 - _DIGIT * _PASSES  # lowest bits of a gain that the cut ignores


class Choice(NamedTuple):
    """Each row keeps its `kept` blocks with the largest keys; `last` is the smallest key among them.

    The rows are the last ones of the grid: all rows, or the rows of a prompt's chunk.
    """

    keys: Int[Array, "B H m width"]
    last: Int[Array, "B H rows"]
    kept: Int[Array, "B H rows"]
    row_ptr: Int[Array, "B H rows_and_one"]

    def blocks(self, rows: Rows) -> Bool[Array, "B H rows n"]:
        reach = self.keys[:, :, : rows.number, : rows.grid.columns] >= self.last[..., None]
        return reach & rows.grid.causal()[None, None, rows.first :] & (self.kept > 0)[..., None]

    def lists(self, rows: Rows, capacity: int) -> tuple[Array, Array, Array]:
        """The lists that `compact.compact` makes. A row's partial blocks are those that the diagonal cuts, all on."""
        indices, row_ptr, num_full, _ = self.finished_lists(rows, capacity)
        return indices[..., :capacity], row_ptr, num_full

    def finished_lists(self, rows: Rows, capacity: int) -> tuple[Array, Array, Array, Array]:
        """As `lists.rows.finished` makes them, with one slot more."""
        indices, order, num_full = _columns(self, rows, capacity)
        can_be_full = rows.grid.full()[rows.first :].any(-1)
        if not can_be_full.all():
            num_full = jnp.where(can_be_full, num_full, 0)
        return indices, self.row_ptr, num_full, order


def choose(
    logits: Float[Array, "B H m width"],
    rows: Rows,
    *,
    sensitivity: Float[Array, "H"],
    burstiness: Float[Array, "H"],
    count: Int[Array | np.ndarray, "..."] | int | None = None,
    threshold: Float[Array | np.ndarray, ""] | float | None = None,
    normalise: bool = True,
    cut: Cut = TOGETHER,
) -> Choice:
    """`choice.choose`, from `padded` logits or, with `normalise=False`, from masses.

    Entries above the diagonal or past the last row are never read. Gains that agree in 16 bits of their mantissa count
    as equal. Where a `cut` has shards, XLA finds the cut from the kernels' gains.

    Where `rows` are a chunk's, they alone compete for `count`, which may be one number per sequence, [B, 1], and rows
    past a sequence's end keep nothing. They have no `cut`.
    """
    b, h, m, width = logits.shape
    grid = rows.grid
    wanted = None if count is None else jnp.asarray(count, jnp.int32)
    groups = wanted.shape[-1] if wanted is not None and wanted.ndim and cut == TOGETHER else 1
    keys, in_order, gain, counts = _sorted_gains(logits, rows, sensitivity, burstiness, normalise, groups)
    order = lax.bitcast_convert_type(gain, jnp.int32)
    if wanted is None:
        least = jnp.broadcast_to(lax.bitcast_convert_type(jnp.float32(threshold), jnp.int32), (b, h, 1))
        kept = _reach(order, least, rows, m)[..., 0]
    elif cut != TOGETHER:
        written = np.arange(width) >= width - np.count_nonzero(grid.causal(), -1)[:, None]
        positive = (order[:, :, : grid.rows] >> _DROPPED) + 1
        kept = kept_per_row(jnp.where(written, positive, 0).astype(jnp.uint32), wanted, grid, cut)
    else:
        wanted = jnp.broadcast_to(wanted, (b, groups))
        grouped = order.reshape(b, groups, h // groups * m, width)
        counts = _counts(grouped, wanted, rows, m, counts)
        reach = _reach_of_cut(grouped, counts, wanted, rows, m)
        return Choice(keys, *_shared_out(reach, counts, wanted, in_order, rows.number))
    kept = kept[..., : rows.number]
    last = jnp.take_along_axis(in_order[:, :, : rows.number], width - jnp.maximum(kept, 1)[..., None], -1)[..., 0]
    row_ptr = jnp.concatenate([jnp.zeros((b, h, 1), jnp.int32), jnp.cumsum(kept, -1, dtype=jnp.int32)], -1)
    return Choice(keys, last, kept, row_ptr)


# -- lists -----------------------------------------------------------------------------------------------------------


def _columns(
    choice: Choice, rows: Rows, capacity: int
) -> tuple[Int[Array, "B H slots"], Int[Array, "B H rows"], Int[Array, "B H rows"]]:
    """(columns of the chosen blocks, row after row, and a slot more than `capacity`; rows by length, longest first; a
    row's blocks before its own).

    Free slots get the last row's last column.
    """
    b, h, m, width = choice.keys.shape
    n, first, tall = rows.number, rows.first, rows.grid.tall
    tile = _LIST_ENTRIES // width or 1
    programs = -(-n // tile)
    free = pl.next_power_of_2(-(-(capacity + 1) // programs))
    all_rows, spare_row = pl.next_power_of_2(n), n % tile > 0

    def kernel(
        keys_ref: Any,
        last_ref: Any,
        row_ptr_ref: Any,
        length_ref: Any,
        out_ref: Any,
        order_ref: Any,
        others_ref: Any,
    ) -> None:
        begin = pl.program_id(0) * tile
        row = begin + iota(tile)
        exists = row < n
        start = plgpu.load(row_ptr_ref.at[row], mask=exists, other=0)
        end = plgpu.load(row_ptr_ref.at[row + 1], mask=exists, other=0)
        last = plgpu.load(last_ref.at[row], mask=exists, other=0)
        nonempty = exists & (end > start)

        def at(used: int) -> None:
            column = jnp.broadcast_to(iota(used)[None, :], (tile, used))
            inside = (column < (first + row[:, None] + 1) * tall) & nonempty[:, None]
            keys = plgpu.load(keys_ref.at[pl.ds(begin, tile), pl.ds(0, used)], mask=inside, other=-1)
            chosen = inside & (keys >= last[:, None])
            slot = start[:, None] + jnp.cumsum(chosen.astype(jnp.int32), 1) - 1
            written = chosen & (slot < capacity)
            # Interpretation writes masked elements too, with their old values: the spare slot takes those.
            plgpu.store(out_ref.at[jnp.where(written, slot, capacity)], column, mask=written)

        _by_width((first + begin + tile) * tall - 1, width, at)

        other = iota(all_rows)
        there = other < n
        pointer = plgpu.load(row_ptr_ref.at[other], mask=there, other=0)
        length = jnp.where(there, plgpu.load(row_ptr_ref.at[other + 1], mask=there, other=0) - pointer, -1)
        own = (end - start)[:, None]
        longer = (length[None, :] > own) | ((length[None, :] == own) & (other[None, :] < row[:, None]))
        rank = longer.astype(jnp.int32).sum(1)
        plgpu.store(order_ref.at[jnp.where(exists, rank, n)], row, mask=exists)
        cut_by_diagonal = jnp.maximum(rows.blocks_of(first + row, length_ref) - (first + row) * tall, 0)
        others = jnp.maximum(end - start - cut_by_diagonal, 0)
        plgpu.store(others_ref.at[jnp.where(exists, row, n)], others, mask=exists)

        slot = jnp.minimum(row_ptr_ref[n], capacity) + pl.program_id(0) * free + iota(free)
        used_rows = jnp.where(length > 0, other + 1, 0).max()
        final = jnp.where(used_rows > 0, rows.blocks_of(first + used_rows - 1, length_ref) - 1, 0)
        plgpu.store(out_ref.at[jnp.minimum(slot, capacity)], jnp.broadcast_to(final, slot.shape))

    per_row = ((b, h, n + spare_row), jnp.int32, whole(None, None, n + spare_row))
    out, order, others = triton_call(
        kernel,
        "hads_lists",
        (programs, h, b),
        [
            (choice.keys, whole(None, None, m, width)),
            (choice.last, whole(None, None, n)),
            (choice.row_ptr, whole(None, None, n + 1)),
            rows.input(b),
        ],
        [
            ((b, h, capacity + 1), jnp.int32, whole(None, None, capacity + 1)),
            per_row,
            per_row,
        ],
        num_warps=_LIST_WARPS,
    )
    return out, order[..., :n], others[..., :n]


# -- gains -----------------------------------------------------------------------------------------------------------


def _sorted_gains(
    logits: Float[Array, "B H m width"],
    rows: Rows,
    sensitivity: Array,
    burstiness: Array,
    normalise: bool,
    groups: int,
) -> tuple[Array, ...]:
    """As `gain.sorted_gains`, [B, H, m, width] each, and zeros for `_counts`.

    Sorted keys and gains of a row of k blocks are in its last k entries; the entries before them are not written. Keys
    past a sequence's end are -1.
    """
    b, h, m, width = logits.shape
    tile = 2 if width <= _TWO_ROWS else 1
    steps = -(-rows.number // tile)

    def kernel(
        logits_ref: Any,
        omega_ref: Any,
        phi_ref: Any,
        length_ref: Any,
        keys_ref: Any,
        rows_ref: Any,
        gain_ref: Any,
        counts_ref: Any,
    ) -> None:
        counts_ref[...] = jnp.zeros((_PASSES, _CUTS), jnp.int32)
        begin = (steps - 1 - pl.program_id(0)) * tile  # long rows first
        omega, phi = omega_ref[0], phi_ref[0]
        row = (rows.first + begin + iota(tile))[:, None]
        blocks, tall = rows.blocks_of(row, length_ref), rows.grid.tall
        weight = omega * rows.weight(row, length_ref)

        def at(used: int) -> None:
            column = iota(used)[None, :]
            inside = column < blocks
            here = (pl.ds(begin, tile), pl.ds(0, used))
            x = plgpu.load(logits_ref.at[here], mask=inside, other=-jnp.inf if normalise else 0.0)
            if normalise:
                x = jnp.exp(x - x.max(1)[:, None])
                x = x / x.sum(1)[:, None]
            keys = jnp.where(inside, key_of(x, row, column, rows.grid), -1)
            plgpu.store(keys_ref.at[here], keys, mask=column < (row + 1) * tall)
            ordered = sort_rows(keys)
            gain = gains_of_sorted(ordered, weight, phi)
            there = (pl.ds(begin, tile), pl.ds(width - used, used))
            plgpu.store(rows_ref.at[there], ordered, mask=ordered >= 0)
            plgpu.store(gain_ref.at[there], gain, mask=ordered >= 0)

        _by_width((rows.first + begin + tile) * rows.grid.tall - 1, width, at)

    def of_head(x: Array) -> tuple[Array, pl.BlockSpec]:
        return jnp.asarray(x, jnp.float32)[:, None], pl.BlockSpec((None, 1), lambda i, h, b: (h, 0))

    square = whole(None, None, m, width)
    return triton_call(
        kernel,
        "hads_sorted_gains",
        (steps, h, b),
        [(logits, square), of_head(sensitivity), of_head(burstiness), rows.input(b)],
        [
            (logits.shape, jnp.int32, square),
            (logits.shape, jnp.int32, square),
            (logits.shape, jnp.float32, square),
            ((b, groups, _PASSES, _CUTS), jnp.int32, _of_group(h // groups, _PASSES, _CUTS)),
        ],
        num_warps=_SORT_WARPS,
    )


def _of_group(heads: int, *shape: int) -> pl.BlockSpec:
    """A whole array of the group that a head is in; a group has so many heads."""
    return pl.BlockSpec((None, None, *shape), lambda i, h, b: (b, h // heads, *(0,) * len(shape)))


def _by_width(column: Array, width: int, at: Callable[[int], None]) -> None:
    """Call at(columns) with a quarter, half or all of `width`: the least that holds the column.

    The last row of a program may be padding, its columns past the width.
    """
    column = jnp.minimum(column, width - 1)
    widths = [used for used in (width // 4, width // 2, width) if used >= TILE]
    for shorter, used in zip([0, *widths], widths, strict=False):
        pl.when((column >= shorter) & (column < used))(partial(at, used))


# -- the cut ---------------------------------------------------------------------------------------------------------


def _counts(
    order: Int[Array, "B G all width"],
    wanted: Int[Array, "B G"],
    rows: Rows,
    m: int,
    counts: Int[Array, "B G passes cuts"],
) -> Int[Array, "B G passes cuts"]:
    """How many entries of a group reach the cuts of each pass, whose first digits earlier passes have found.

    The cut is the largest that at least `wanted` entries reach, without the lowest bits. `counts` are zeros, which the
    passes add to.
    """
    b, groups, together, width = order.shape
    block = whole(None, None, _PASSES, _CUTS)
    for number in range(_PASSES):

        def kernel(
            order_ref: Any, wanted_ref: Any, length_ref: Any, _: Any, counts_ref: Any, number: int = number
        ) -> None:
            digits = _known(counts_ref, wanted_ref[0], number) + (iota(_CUTS) << _place(number))
            found = _search(order_ref, digits, _DROPPED, rows, m, length_ref)
            jax.ref.addupdate(counts_ref, (number, slice(None)), found.sum(0))

        (counts,) = triton_call(
            kernel,
            f"hads_cut_{number}",
            (together // _SEARCHED_ROWS, groups, b),
            [
                (order, whole(None, None, together, width)),
                (wanted[..., None], whole(None, None, 1)),
                rows.input(b),
                (counts, block),
            ],
            [(counts.shape, jnp.int32, block)],
            num_warps=_CUT_WARPS,
            aliases={3: 0},
        )
    return counts


def _shared_out(
    reach: Int[Array, "B G all 2"],
    counts: Int[Array, "B G passes cuts"],
    wanted: Int[Array, "B G"],
    in_order: Int[Array, "B H m width"],
    number: int,
) -> tuple[Int[Array, "B H rows"], Int[Array, "B H rows"], Int[Array, "B H rows_and_one"]]:
    """(`last`, `kept` and `row_ptr` of a `Choice`): every entry above the cut, and the last of those equal to it.

    `reach`: how many entries of each row are at the cut or above it, and how many above it.
    """
    b, h, m, width = in_order.shape
    groups, together = reach.shape[1:3]
    per = h // groups
    n, everything = pl.next_power_of_2(number), pl.next_power_of_2(together)

    def kernel(
        own_ref: Any,
        all_ref: Any,
        counts_ref: Any,
        wanted_ref: Any,
        in_order_ref: Any,
        last_ref: Any,
        kept_ref: Any,
        row_ptr_ref: Any,
    ) -> None:
        head = lax.rem(pl.program_id(1), jnp.int32(per))
        entry = iota(everything)
        of_later = (entry >= (head + 1) * m) & (entry < together)
        at_cut, above = (plgpu.load(all_ref.at[entry, i], mask=of_later, other=0) for i in range(2))
        later_heads = (at_cut - above).sum()

        row = iota(n)[None, :]
        exists = row < number
        at_cut, above = (plgpu.load(own_ref.at[row, i], mask=exists, other=0) for i in range(2))
        equal = at_cut - above
        later = later_heads + equal.sum() - jnp.cumsum(equal, 1)
        left = wanted_ref[0] - _above(counts_ref, wanted_ref[0])
        kept = above + jnp.clip(left - later, 0, equal)
        ends = jnp.cumsum(kept, 1)
        last = plgpu.load(in_order_ref.at[row, width - jnp.maximum(kept, 1)], mask=exists, other=0)
        plgpu.store(kept_ref.at[row], kept)
        plgpu.store(last_ref.at[row], last)
        plgpu.store(row_ptr_ref.at[row], ends - kept)
        row_ptr_ref[n] = kept.sum()

    last, kept, row_ptr = triton_call(
        kernel,
        "hads_kept",
        (1, h, b),
        [
            (reach.reshape(b, h, m, 2), whole(None, None, m, 2)),
            (reach, _of_group(per, together, 2)),
            (counts, _of_group(per, _PASSES, _CUTS)),
            (wanted[..., None], _of_group(per, 1)),
            (in_order, whole(None, None, m, width)),
        ],
        [
            ((b, h, n), jnp.int32, whole(None, None, n)),
            ((b, h, n), jnp.int32, whole(None, None, n)),
            ((b, h, n + 1), jnp.int32, whole(None, None, n + 1)),
        ],
        num_warps=_KEPT_WARPS,
    )
    return last[..., :number], kept[..., :number], row_ptr[..., : number + 1]


def _above(counts_ref: Any, wanted: Array) -> Array:
    """How many entries are above the cut: as many as the largest of the counts that are too small."""
    most = jnp.int32(0)
    for number in range(_PASSES):
        counts = counts_ref[number, :]
        most = jnp.maximum(most, jnp.where(counts < wanted, counts, 0).max())
    return most


def _place(number: int) -> int:
    return _DIGIT * (_PASSES - 1 - number)


def _known(counts_ref: Any, wanted: Array, passes: int) -> Array:
    """The digits that earlier passes found, in their places."""
    cut = jnp.int32(0)
    for number in range(passes):
        enough = (counts_ref[number, :] >= wanted) & (iota(_CUTS) > 0)
        cut = cut + (enough.astype(jnp.int32).sum() << _place(number))
    return cut


def _reach(
    order: Int[Array, "B G all width"], cuts: Int[Array, "B G C"], rows: Rows, m: int
) -> Int[Array, "B G all C"]:
    """How many entries of each row reach each cut."""
    c = cuts.shape[-1]

    def kernel(order_ref: Any, cuts_ref: Any, length_ref: Any, out_ref: Any) -> None:
        out_ref[...] = _search(order_ref, cuts_ref[...], 0, rows, m, length_ref)

    return _search_rows(kernel, order, [(cuts, whole(None, None, c))], rows, c)


def _reach_of_cut(
    order: Int[Array, "B G all width"],
    counts: Int[Array, "B G passes cuts"],
    wanted: Int[Array, "B G"],
    rows: Rows,
    m: int,
) -> Int[Array, "B G all 2"]:
    """How many entries of each row reach the cut that the counts tell, and how many are above it."""

    def kernel(order_ref: Any, counts_ref: Any, wanted_ref: Any, length_ref: Any, out_ref: Any) -> None:
        cuts = _known(counts_ref, wanted_ref[0], _PASSES) + iota(2)
        out_ref[...] = _search(order_ref, cuts, _DROPPED, rows, m, length_ref)

    inputs = [(counts, whole(None, None, _PASSES, _CUTS)), (wanted[..., None], whole(None, None, 1))]
    return _search_rows(kernel, order, inputs, rows, 2)


def _search_rows(
    kernel: Callable, order: Int[Array, "B G all width"], inputs: list, rows: Rows, cuts: int
) -> Int[Array, "B G all {cuts}"]:
    """`kernel` for all rows of `order`, as many as a program takes at a time."""
    b, groups, together, width = order.shape
    (out,) = triton_call(
        kernel,
        "hads_reach",
        (together // _SEARCHED_ROWS, groups, b),
        [(order, whole(None, None, together, width)), *inputs, rows.input(b)],
        [
            (
                (b, groups, together, cuts),
                jnp.int32,
                pl.BlockSpec((None, None, _SEARCHED_ROWS, cuts), lambda i, g, b: (b, g, i, 0)),
            )
        ],
        num_warps=1,
    )
    return out


def _search(
    order_ref: Any, cuts: Int[Array, "C"], dropped: int, rows: Rows, m: int, length_ref: Any
) -> Int[Array, "R C"]:
    """How many entries of each of this program's rows reach each cut. The entries of a row rise; a head has m rows."""
    width = order_ref.shape[1]
    row = pl.program_id(0) * _SEARCHED_ROWS + iota(_SEARCHED_ROWS)
    i = rows.first + lax.rem(row, jnp.int32(m))
    # Rows after the chunk's last one are padding, though the sequence may go on.
    exists = (i < rows.grid.rows) & (i < rows.grid.rows_of(rows.end(length_ref)))
    own = jnp.where(exists, rows.blocks_of(i, length_ref), 0)
    shape = (_SEARCHED_ROWS, cuts.shape[0])
    row, cuts = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(cuts[None, :], shape)
    low = jnp.broadcast_to((width - own)[:, None], shape)
    high = jnp.full(shape, width, jnp.int32)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        searching = low < high
        middle = (low + high) >> 1
        value = plgpu.load(order_ref.at[row, middle], mask=searching, other=0)
        reaches = (value >> dropped) >= cuts
        return jnp.where(searching & ~reaches, middle + 1, low), jnp.where(searching & reaches, middle, high)

    low, _ = lax.fori_loop(0, width.bit_length(), halve, (low, high))
    return width - low
