"""Named workloads: the shapes and masks that tests, benchmarks and tuning share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.hads.mask.block_mask import BlockMask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    is_causal: bool
    block: int = 128
    kv_length: int | None = None  # None: `length`; below, None: `head_dim` and `block`
    value_dim: int | None = None
    block_kv: int | None = None

    @property
    def shape(self) -> str:
        """As it is given to `xsake race`.

        >>> WORKLOADS["llama32k"].shape
        '1x32768x32x128,kv=8,causal'
        """
        kv = [] if self.kv_length in (None, self.length) else [f"{self.kv_length}x{self.kv_heads}"]
        kv = kv or ([f"{self.kv_heads}"] if self.kv_heads != self.q_heads else [])
        parts = [f"{self.batch}x{self.length}x{self.q_heads}x{self.head_dim}", *(f"kv={heads}" for heads in kv)]
        parts += [f"dv={self.value_dim}"] if self.value_dim not in (None, self.head_dim) else []
        block_kv = self.block_kv or self.block
        parts += [f"block={self.block}x{block_kv}"] if (self.block, block_kv) != (128, 128) else []
        return ",".join([*parts, *(["causal"] if self.is_causal else [])])

    def inputs(self, dtype: jax.typing.DTypeLike, seed: int = 0) -> tuple[Array, Array, Array]:
        """Random query, key and value."""
        kv_length = self.kv_length or self.length
        shapes = (
            (self.length, self.q_heads, self.head_dim),
            (kv_length, self.kv_heads, self.head_dim),
            (kv_length, self.kv_heads, self.value_dim or self.head_dim),
        )
        return tuple(  # type: ignore[return-value]
            jax.random.normal(key, (self.batch, *shape), jnp.float32).astype(dtype)
            for key, shape in zip(jax.random.split(jax.random.key(seed), 3), shapes, strict=True)
        )

    def mask(
        self, density: float, *, seed: int = 0, block: int | None = None, capacity: int | None = None
    ) -> BlockMask:
        """Random blocks at about `density`, and always the diagonal; the query heads of a group share their blocks.

        On short sequences the diagonal makes the true density higher than `density`: report `mask.density()`.
        """
        at = self if block is None else dataclasses.replace(self, block=block, block_kv=None)
        return at._build(np.full(self.kv_heads, density), seed, capacity)

    def to_ask_for(self, density: float) -> float:
        """The density to ask `mask` for, so that the true density is about this one; above 0.

        >>> round(WORKLOADS["cpu4k"].to_ask_for(0.5376), 2)  # true density 53.76% where 50% are asked for
        0.51
        """
        block_kv = self.block_kv or self.block
        num_q, num_kv = -(-self.length // self.block), -(-(self.kv_length or self.length) // block_kv)
        reached = np.minimum((np.arange(num_q) + 1) * self.block - 1, self.length - 1) // block_kv + 1
        allowed = np.minimum(reached, num_kv).sum() if self.is_causal else num_q * num_kv
        diagonal = num_q / allowed
        return 1.0 if diagonal == 1 else float(np.clip((density - diagonal) / (1 - diagonal), 1e-9, 1))

    def uneven_mask(self, *, capacity: int | None = None) -> BlockMask:
        """Like `mask`, with densities from 0.1 to 0.9 over the heads, as head-adaptive sparsity makes them."""
        return self._build(np.linspace(0.1, 0.9, self.kv_heads), 0, capacity)

    def _build(self, densities: np.ndarray, seed: int, capacity: int | None) -> BlockMask:
        kv_length, block_kv = self.kv_length or self.length, self.block_kv or self.block
        num_q, num_kv = -(-self.length // self.block), -(-kv_length // block_kv)
        drawn = np.random.default_rng(seed).random((self.q_heads, num_q, num_kv))[: self.kv_heads]
        diagonal = np.minimum(np.arange(num_q) * self.block // block_kv, num_kv - 1)
        blocks = (drawn < densities[:, None, None]) | (np.arange(num_kv) == diagonal[:, None])
        return BlockMask.from_blocks(
            np.repeat(blocks, self.q_heads // self.kv_heads, axis=0),
            block_q=self.block,
            block_kv=block_kv,
            q_len=self.length,
            kv_len=kv_length,
            is_causal=self.is_causal,
            capacity=capacity,
        )

    def flops(self, mask: BlockMask | None = None) -> float:
        """Operations of a forward: of active blocks only, and half of a block on a causal diagonal.

        Forward and backward together take 3.5 times as many.
        """
        share = 0.5 if self.is_causal else 1.0
        if mask is not None:
            blocks = np.asarray(mask.to_blocks(), float)
            if self.is_causal:
                blocks *= _share_below_diagonal(blocks.shape[-2:], mask.block_q, mask.block_kv)
            share = float(blocks.mean())
        logits = self.batch * self.q_heads * self.length * (self.kv_length or self.length)
        return 2.0 * logits * (self.head_dim + (self.value_dim or self.head_dim)) * share


def _share_below_diagonal(blocks: tuple[int, int], block_q: int, block_kv: int) -> np.ndarray:
    """The share of each block's area that is below the diagonal: a half, where square blocks are on it."""

    def area(x: np.ndarray) -> np.ndarray:
        """The integral of clip(t, 0, block_kv) over t up to x."""
        inside = np.clip(x, 0, block_kv)
        return inside * inside / 2 + block_kv * (np.maximum(x, block_kv) - block_kv)

    first = np.arange(blocks[0])[:, None] * block_q - np.arange(blocks[1]) * block_kv
    return (area(first + block_q) - area(first)) / (block_q * block_kv)


WORKLOADS = {
    w.name: w
    for w in (
        Workload(name="cpu4k", batch=1, q_heads=8, kv_heads=8, length=4096, head_dim=64, is_causal=True),
        Workload(name="cpu16k", batch=1, q_heads=8, kv_heads=8, length=16384, head_dim=64, is_causal=True),
        Workload(name="gpt4k", batch=4, q_heads=16, kv_heads=16, length=4096, head_dim=128, is_causal=True),
        Workload(name="gpt4k_d64", batch=4, q_heads=12, kv_heads=12, length=4096, head_dim=64, is_causal=True),
        Workload(name="llama32k", batch=1, q_heads=32, kv_heads=8, length=32768, head_dim=128, is_causal=True),
        Workload(name="full16k", batch=1, q_heads=16, kv_heads=16, length=16384, head_dim=128, is_causal=False),
    )
}
