"""A layer of padded prompts, as the methods of the study see it.

Methods choose from whole sequences of one length. Prompts differ in length, and each length would compile every program
anew: so prompts are padded, and the padding is hidden from the methods. A block that a prompt ends in is filled up with
its own tokens, so that means and peaks over the block are those of its tokens. Rows past a prompt's end keep nothing.
That is right for methods that rank a row of blocks by its own queries and the keys before them: `METHODS_HERE`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.hads.methods import METHODS
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.methods.layer import Blocks, Layer
from xsake.hads.study.methods.registry import FORMS

_RIVALS = (
    *("sink_window", "sliding_window", "longformer", "power"),
    *("mean_top_k", "x_attention_8", "x_attention_16", "flash_prefill", "quest", "cobs", "sparge", "blasst"),
    "hads_shares_top_k",
)
METHODS_HERE = (
    *(f"{name}{form}" for name in _RIVALS for form in FORMS),
    *("oracle_top_k", "oracle_top_k+forced", "oracle_top_p+forced", "oracle_gain"),
)


def program_of(name: str) -> Callable[..., Blocks]:
    """The method's program for padded prompts; methods that share a program share its compiled form."""
    if name not in METHODS_HERE:
        raise ValueError(
            f"{name!r} cannot read padded prompts: it looks at the end of a whole sequence, or must know more of the "
            f"model than its profile says, or is unknown. These can: dense, hads, {', '.join(METHODS_HERE)}"
        )
    return METHODS[name].program


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
    x = Layer(query, key, grid, layer, counts[layer], profile, with_forced, lengths=lengths)
    blocks = program(x) & x.rows.allowed()
    return blocks, blocks.sum((1, 2, 3))


def _fill_last_block(x: Array, lengths: Array, block: int) -> Array:
    """[B, T, heads, D] in which the tokens of each prompt's last block, repeated, take the place of its padding."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    start = (lengths[:, None] - 1) // block * block
    source = jnp.where(place < lengths[:, None], place, start + (place - start) % (lengths[:, None] - start))
    return jnp.take_along_axis(x, source[:, :, None, None], 1)
