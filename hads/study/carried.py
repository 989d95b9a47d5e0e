"""The blocks that an answer hangs on, and how many of them a mask leaves out.

A query that asks, at a token whose next one belongs to an answer, may give much of its attention to a single block far
back: that block carries the answer. Where it is lost the answer mostly is, which a mean over all queries does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.exact import block_sums
from xsake.hads.study.methods.layer import Blocks
from xsake.hads.study.texts import Text

MUCH = 0.3  # of a query's attention


def asking(texts: Sequence[Text], most: int) -> Int[np.ndarray, "B {most}"]:
    """The tokens of each text after which an answer's token comes; -1 in the slots that are left."""
    found = np.full((len(texts), most), -1, np.int32)
    for row, text in zip(found, texts, strict=True):
        at = _asking(text)
        row[: len(at)] = at
    return found


def most_asking(texts: Sequence[Text]) -> int:
    return max(len(_asking(text)) for text in texts)


def _asking(text: Text) -> np.ndarray:
    return np.zeros(0, np.int32) if text.items is None else np.flatnonzero(text.items)


@partial(jax.jit, static_argnames="grid")
def carried(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T K D"],
    kept: Blocks,
    asking: Int[Array | np.ndarray, "B Q"],
    grid: CausalGrid,
) -> Int[Array, "B two"]:
    """(how many blocks, not forced, hold MUCH of the attention of an asking query in a head; how many are not kept)."""
    b, _, h, d = query.shape
    there = (asking >= 0)[:, None, :, None]
    at = jnp.maximum(jnp.asarray(asking), 0)
    q = jnp.take_along_axis(query, at[:, :, None, None], 1).reshape(b, -1, key.shape[2], h // key.shape[2], d)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, key, preferred_element_type=jnp.float32) * d**-0.5
    seen = at[:, None, None, :, None] >= jnp.arange(key.shape[1])[None, None, None, None]
    mass = block_sums(jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1), grid).reshape(b, h, -1, grid.columns)
    row = at // grid.block_q
    free = ~jnp.asarray(grid.forced())[row][:, None]
    much = (mass >= MUCH) & free & there
    mine = jnp.take_along_axis(kept, row[:, None, :, None], 2)
    return jnp.stack([much.sum((1, 2, 3)), (much & ~mine).sum((1, 2, 3))], -1)
