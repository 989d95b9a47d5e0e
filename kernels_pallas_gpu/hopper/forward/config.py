"""How the Hopper forward is tiled and scheduled: its configuration, the heuristic and the search space."""

import dataclasses
import enum
from typing import Literal

from jax.experimental import pallas as pl

from xsake._ground.fields import check_fields, flag, one_of, whole
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.hopper.limits import HOPPER_SHARED_MEMORY, HOPPER_SMS, hopper_sms

WG_ROWS = 64  # query rows per compute warpgroup


class Pairing(enum.Enum):
    """The work of the two compute warpgroups of a CTA."""

    ROWS = "two halves of a 128-row tile"
    UNION = "two neighbouring mask rows of 64 queries, whose lists are merged (`lists.row_pairs`)"
    HEADS = "the same 64 rows of two heads that share lists, keys and values"
    APART = "unrelated 64-row tiles, each with a memory warpgroup and a ring"
    ALONE = "64-row tiles, with one compute warpgroup only: where two rings do not fit"

    @classmethod
    def of(
        cls,
        block_q: int,
        list_heads: int,
        num_q_heads: int,
        num_kv_heads: int,
        widest_head_dim: int,
        *,
        mergeable: bool,
    ) -> "Pairing":
        """`mergeable`: whether the lists of neighbouring rows may be merged."""
        if block_q % (2 * WG_ROWS) == 0:
            return cls.ROWS
        group = num_q_heads // num_kv_heads
        if group % 2 == 0 and list_heads in (1, num_kv_heads):
            return cls.HEADS
        if widest_head_dim > 128:
            return cls.ALONE
        return cls.UNION if mergeable else cls.APART

    @property
    def halves_rows(self) -> bool:
        """Whether the two warpgroups take the two halves of 128 neighbouring rows."""
        return self in (Pairing.ROWS, Pairing.UNION)


def mergeable(block_q: int, block_kv: int, q_len: int, band: Band, *, plain: bool) -> bool:
    """Whether the lists of neighbouring rows may be merged. `plain`: nothing but the band is tested for elements.

    A tile of 128 keys has room for one block of each row. The rows of a chunk of a prompt, which has keys before its
    first query, are cut where they are long; merged ones are not.
    """
    is_chunk = band.right is not None and band.right > 0
    return plain and block_q == block_kv == WG_ROWS < q_len and not is_chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel is tiled and scheduled.

    Args:
      tile_kv: keys per step. Rows are merged (`Pairing.UNION`) in tiles of 128 keys, and apart with 64.
      stages: depth of the K/V ring.
      q_stages: 2 loads the queries of the next tile ahead.
      num_ctas: persistent CTAs; 0 starts one CTA per tile.
      head_group: interleave the tiles of at most so many heads, so that the long rows of all of them come first; 0 for
        as many heads as the L2 cache holds.
      schedule: "dynamic" has persistent CTAs take tiles from a counter in global memory, "static" deals them out
        beforehand.
      take_turns: one warpgroup multiplies while the other computes its softmax.
    """

    tile_kv: int = one_of(64, 128, default=128)
    stages: int = whole(2, 32, default=2)
    q_stages: int = one_of(1, 2, default=2)
    num_ctas: int = whole(0, 2**16, default=HOPPER_SMS)
    head_group: int = whole(0, 2**16, default=0)
    schedule: Literal["dynamic", "static"] = one_of("dynamic", "static", default="dynamic")
    take_turns: bool = flag(default=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def pairing(self, possible: Pairing) -> Pairing:
        return Pairing.APART if possible is Pairing.UNION and self.tile_kv != 2 * WG_ROWS else possible

    def smem_bytes(self, head_dim: int, v_head_dim: int, pairing: Pairing, num_kv_vectors: int = 0) -> int:
        pairing = self.pairing(pairing)
        compute_wgs, rings = 1 if pairing is Pairing.ALONE else 2, 2 if pairing is Pairing.APART else 1
        q = self.q_stages * compute_wgs * WG_ROWS * head_dim * 2
        out = compute_wgs * WG_ROWS * v_head_dim * 2 if self.separate_out(head_dim, v_head_dim) else 0
        ring = rings * self.stages * self.tile_kv
        # Every buffer begins at a multiple of 1024 bytes. The last two terms are for lse, and for notes and barriers.
        return (
            q + out + ring * (head_dim + v_head_dim) * 2 + num_kv_vectors * pl.cdiv(ring * 4, 1024) * 1024 + 2048 + 512
        )

    def separate_out(self, head_dim: int, v_head_dim: int) -> bool:
        """Whether the output is staged in a buffer of its own; otherwise it overwrites the queries."""
        return self.q_stages == 2 or head_dim != v_head_dim

    def fits(self, head_dim: int, v_head_dim: int, pairing: Pairing, num_kv_vectors: int = 0) -> bool:
        # An accumulator of 64 x 256 leaves no registers for logits of 64 x 128.
        if v_head_dim > 128 and self.tile_kv > 64:
            return False
        return self.smem_bytes(head_dim, v_head_dim, pairing, num_kv_vectors) <= HOPPER_SHARED_MEMORY


def heuristic(
    head_dim: int, v_head_dim: int, pairing: Pairing = Pairing.ROWS, num_kv_vectors: int = 0, widest_tile: int = 128
) -> ForwardConfig:
    """The first configuration that fits: prefer a wide tile, then queries loaded ahead, then a deep ring.

    A call whose tiles are narrower than a configuration says would leave half of the ring unused.
    """
    queries_ahead = (2, 1) if v_head_dim <= 128 else (1,)
    for tile_kv in (128, 64) if widest_tile >= 128 else (64,):
        for q_stages in queries_ahead:
            for stages in (4, 3, 2):
                # Beside an accumulator of 64 x 256 there are no registers for the state of a persistent loop.
                config = ForwardConfig(
                    tile_kv=tile_kv, stages=stages, q_stages=q_stages, num_ctas=0 if v_head_dim > 128 else hopper_sms()
                )
                if config.fits(head_dim, v_head_dim, pairing, num_kv_vectors):
                    return config
    raise NotImplementedError(
        f"{head_dim=} and {v_head_dim=} need more shared memory or registers than Hopper has, in every configuration"
    )


def search_space(
    head_dim: int, v_head_dim: int, pairing: Pairing = Pairing.ROWS, num_kv_vectors: int = 0, widest_tile: int = 128
) -> list[ForwardConfig]:
    first = heuristic(head_dim, v_head_dim, pairing, num_kv_vectors, widest_tile)
    configs = [
        ForwardConfig(tile_kv=tile_kv, stages=stages, q_stages=q_stages, num_ctas=num_ctas)
        for tile_kv in (128, 64)
        for stages in (4, 3, 2)
        for q_stages in (2, 1)
        for num_ctas in (hopper_sms(), 0)
    ]
    configs[:0] = [dataclasses.replace(first, head_group=n) for n in (1, 2, 4, 8, 16, 64)]
    if pairing in (Pairing.ROWS, Pairing.UNION, Pairing.HEADS):
        configs.insert(0, dataclasses.replace(first, take_turns=False))
    return [first, *(c for c in configs if c != first and c.fits(head_dim, v_head_dim, pairing, num_kv_vectors))]
