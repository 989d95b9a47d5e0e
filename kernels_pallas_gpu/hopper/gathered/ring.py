"""A ring of tiles in shared memory that are filled by many small copies, with one arrival per tile.

Pallas divides the bytes of a copy among the 128 threads that arrive at its barrier, and so refuses a copy of 64 bytes
(16 float32 numbers). Here one thread starts the copies and arrives once, with the bytes of all of them. Interpreted,
the copies and barriers are those of Pallas.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from xsake.kernels_pallas_gpu.hopper.work.streaming import Ring

SPLAT = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherRing(Ring):
    """`ready`: a ref of the type `GatherRing.scratch`. `tile_bytes`: bytes of all copies of a tile."""

    tile_bytes: int

    @staticmethod
    def scratch(stages: int, copies: int, *, interpret: bool) -> Any:
        """Barriers of a ring whose tiles are filled by so many copies each."""
        if interpret:
            return plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        return plgpu.SMEM((stages, 2), jnp.int32)

    def start(self) -> None:
        """One warpgroup calls it; the others may use the ring after a barrier."""
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def initialise(_: Any, words: Any) -> None:
            one = _one_thread()
            for slot in range(self.stages):
                mgpu_utils.inline_ptx(
                    "@$0 mbarrier.init.shared::cta.b64 [$1], 1;", one, _slot(words, slot), has_side_effects=True
                )
            mgpu_utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

        initialise(self.ready)

    def copy_heads(self, source: Any, at: tuple[Any, Any, Any], ring: Any, slot: Any, row: Any, n: int) -> None:
        """Copies n heads of a query of source [B, T, H, D], starting at `at`, to a swizzled ring [stages, rows, D]."""
        target = ring.at[slot, pl.ds(pl.multiple_of(row, n), n)]
        if self.interpret:
            batch, query, head = at
            plgpu.copy_gmem_to_smem(source.at[batch, query, pl.ds(head, n)], target, self.ready.at[slot])
            return
        columns = 64 if ring.shape[-1] % 64 == 0 else 32
        tiling = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(tiling), plgpu.RefType(), SPLAT, SPLAT, SPLAT, SPLAT)
        )
        def start_copy(ctx: Any, source: Any, target: Any, words: Any, *at: Any) -> None:
            *place, slot = map(_scalar, at)
            batch, query, head = (mgpu_utils.arith.index_cast(ir.IndexType.get(), x) for x in place)
            ctx.async_copy(
                src_ref=source,
                dst_ref=target,
                gmem_slice=(batch, query, mgpu_utils.ds(head, n), slice(None)),
                gmem_transform=(mgpu.TileTransform((8, columns)),),
                swizzle=2 * columns,
                barrier=_barrier(words, slot),
                arrive=False,
                predicate=_one_thread(),
            )

        start_copy(source, target, self.ready, *map(_int32, (*at, slot)))

    def copy_numbers(self, source: Any, at: tuple[Any, ...], ring: Any, slot: Any, row: Any, n: int) -> None:
        """n float32 numbers of `source` from `at` on, to a ring [stages, rows]; a multiple of 16 bytes."""
        *lead, first = at
        target = ring.at[slot, pl.ds(pl.multiple_of(row, n), n)]
        source = source.at[(*lead, pl.ds(pl.multiple_of(first, n), n))]
        if self.interpret:
            plgpu.copy_gmem_to_smem(source, target, self.ready.at[slot])
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SPLAT))
        def start_copy(_: Any, source: Any, target: Any, words: Any, slot: Any) -> None:
            mgpu_utils.inline_ptx(
                "@$0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4];",
                _one_thread(),
                mgpu_utils.memref_ptr(target),
                mgpu_utils.memref_ptr(source),
                mgpu_utils.c(4 * n, ir.IntegerType.get_signless(32)),
                _slot(words, _scalar(slot)),
                has_side_effects=True,
            )

        start_copy(source, target, self.ready, _int32(slot))

    def tell(self, numbers: Any, slot: Any, place: Any, value: Any) -> None:
        """Writes a number for those who wait for the tile.

        The thread that arrives writes it. Other threads could be late by a whole ring, and write over the next tile's.
        """
        if self.interpret:
            numbers[slot, place] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
        def store(_: Any, target: Any, value: Any) -> None:
            mgpu_utils.inline_ptx(
                "@$0 st.shared.b32 [$1], $2;",
                _one_thread(),
                mgpu_utils.memref_ptr(target),
                _scalar(value),
                has_side_effects=True,
            )

        store(numbers.at[slot, pl.ds(place, 1)], _int32(value))

    def complete(self, slot: Any) -> None:
        """After the last copy of a tile."""
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
        def arrive(_: Any, words: Any, slot: Any) -> None:
            _barrier(words, _scalar(slot)).arrive_expect_tx(self.tile_bytes, predicate=_one_thread())

        arrive(self.ready, _int32(slot))

    def wait(self, tile: Any) -> Any:
        """The slot of a tile, when all of it has arrived."""
        slot = lax.rem(tile, jnp.int32(self.stages))
        if self.interpret:
            plgpu.barrier_wait(self.ready.at[slot])
            return slot

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
        def wait(_: Any, words: Any, slot: Any, parity: Any) -> None:
            odd = mgpu_utils.arith.trunci(ir.IntegerType.get_signless(1), _scalar(parity))
            _barrier(words, _scalar(slot)).wait_parity(odd)

        wait(self.ready, _int32(slot), _int32(lax.rem(lax.div(tile, jnp.int32(self.stages)), jnp.int32(2))))
        return slot


def _int32(x: Any) -> Any:
    return jnp.asarray(x, jnp.int32)


def _scalar(x: Any) -> Any:
    return x.registers.item()


_one_thread = functools.partial(mgpu_utils.single_thread_predicate, mgpu_utils.ThreadSubset.WARPGROUP)


def _slot(words: Any, slot: Any) -> Any:
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(words), [slot], ir.IntegerType.get_signless(64))


def _barrier(words: Any, slot: Any) -> Any:
    zero = mgpu_utils.c(0, ir.IntegerType.get_signless(32))
    return mgpu_utils.BarrierRef(_slot(words, slot), zero, None, 1)
