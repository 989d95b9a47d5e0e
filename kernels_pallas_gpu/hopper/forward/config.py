"""How the Hopper forward is tiled and scheduled, and what its two compute warpgroups work on."""

import dataclasses
import enum
from typing import Literal

from xsake._ground.fields import check_fields, flag, one_of, whole
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.limits import HOPPER_SMS

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

    A tile of 128 keys has room for one block of each row. A chunk of a prompt, which has keys before its first query,
    cuts its long rows into parts; merged rows cannot be cut.
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

    def separate_out(self, head_dim: int, v_head_dim: int) -> bool:
        """Whether the output is staged in a buffer of its own; otherwise it overwrites the queries."""
        return self.q_stages == 2 or head_dim != v_head_dim
