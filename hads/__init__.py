"""The contract (BlockMask) and its producers."""

from xsake.hads.block_mask import BlockMask, density_bucket

__all__ = ["BlockMask", "density_bucket"]
