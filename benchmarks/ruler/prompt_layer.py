"""A layer of padded prompts, as the methods of the study see it.

Methods choose from whole sequences of one length. Prompts differ in length, and each length would compile every program
anew: so prompts are padded, and the padding is hidden from the methods. A block that a prompt ends in is filled up with
its own tokens, so that means and peaks over the block are those of its tokens. Rows past a prompt's end keep nothing.
That is right for methods that rank a row of blocks by its own queries and the keys before them: `METHODS_HERE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.hads.methods import METHODS
from xsake.hads.calibration.block_statistics import block_statistics
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.choice import choose
from xsake.hads.selection.keep import keep_largest
from xsake.hads.study.methods.layer import Blocks, Layer, Priority

_RIVALS = (
    *("sink_window", "sliding_window", "longformer", "power"),
    *("mean_top_k", "x_attention_8", "x_attention_16", "flash_prefill", "quest", "cobs", "sparge", "blasst"),
    "hads_shares_top_k",
)
METHODS_HERE = (
    *(f"{name}{form}" for name in _RIVALS for form in ("", "+forced")),
    *("oracle_top_k", "oracle_top_k+forced", "oracle_top_p+forced", "oracle_gain"),
)
_LOWEST = -1e30  # a priority above that of all padding


@dataclasses.dataclass(frozen=True)
class PromptLayer(Layer):
    """A layer of prompts of `lengths` tokens; `count` has one number per prompt."""

    lengths: Array | None = None

    @property
    def exists(self) -> Array:
        """bool[B, 1, rows, n]: whether a block holds queries and keys of the prompt."""
        grid, lengths = self.grid, jnp.asarray(self.lengths)[:, None]
        rows, columns = jnp.arange(grid.rows) * grid.block_q < lengths, jnp.arange(grid.columns) * grid.block < lengths
        return rows[:, None, :, None] & columns[:, None, None]

    def keep(self, priority: Priority) -> Blocks:
        ranked = jnp.where(self.exists, jnp.maximum(priority, _LOWEST), -jnp.inf)
        return keep_largest(ranked, self.grid, self.count, self.forced & self.exists)


def oracle_gain(x: PromptLayer) -> Blocks:
    """HADS's rule on true masses; the last rows, which count more, are each prompt's own."""
    sensitivity, burstiness = (jnp.asarray(of)[x.number] for of in (x.profile.sensitivity, x.profile.burstiness))
    mass = block_statistics(x.query, x.key, **x.grid.shape).share
    rule = {"sensitivity": sensitivity, "burstiness": burstiness}
    return choose(mass, x.grid, lengths=jnp.asarray(x.lengths), count=jnp.asarray(x.count)[:, None], **rule)


_OWN_PROGRAMS: dict[str, Callable[..., Blocks]] = {"oracle_gain": oracle_gain}


def program_of(name: str) -> Callable[..., Blocks]:
    """The method's program for a `PromptLayer`; methods that share a program share its compiled form."""
    if name not in METHODS_HERE:
        raise ValueError(
            f"{name!r} cannot read padded prompts: it looks at the end of a whole sequence, or must know more of the "
            f"model than its profile says, or is unknown. These can: dense, hads, {', '.join(METHODS_HERE)}"
        )
    return _OWN_PROGRAMS.get(name, METHODS[name].program)


def forces(name: str) -> bool:
    """Whether the method always keeps HADS's forced blocks."""
    return METHODS[name].forced


@partial(jax.jit, static_argnums=0)
def choose_blocks(
    program: Callable[..., Blocks],
    profile: HadsProfile,
    with_forced: Array,
    layer: Array,
    query: Array,
    key: Array,
    counts: Array,
    lengths: Array,
) -> tuple[Blocks, Array]:
    """A layer's kept blocks, bool[B, H, rows, n], and for each prompt how many of its own it keeps."""
    query = _fill_last_block(query, lengths, profile.block_q)
    key = _fill_last_block(key, lengths, profile.block)
    grid = profile.grid(query.shape[1])
    x = PromptLayer(query, key, grid, layer, counts[layer], profile, with_forced, lengths=lengths)
    blocks = program(x) & x.exists
    return blocks, blocks.sum((1, 2, 3))


def _fill_last_block(x: Array, lengths: Array, block: int) -> Array:
    """[B, T, heads, D] in which the tokens of each prompt's last block, repeated, take the place of its padding."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    start = (lengths[:, None] - 1) // block * block
    source = jnp.where(place < lengths[:, None], place, start + (place - start) % (lengths[:, None] - start))
    return jnp.take_along_axis(x, source[:, :, None, None], 1)
