"""`xsake.attention` as peers call theirs."""

import math

import jax
import jax.numpy as jnp

import xsake


def attend(query, key, value, *, bias=None, mask=None, **options):
    """Any number of batch dims, and a dense boolean mask that becomes a bias."""
    lead = query.shape[:-3]

    def one_batch(x):
        return x.reshape(math.prod(lead), *x.shape[len(lead) :])

    def full_rank(x):
        return jax.lax.broadcast_to_rank(x, max(query.ndim, 4))

    if mask is not None:
        # As jax.nn does: a row that is masked everywhere attends to everything alike.
        lowest = -0.7 * float(jnp.finfo(jnp.float32).max)
        bias = jnp.zeros((1,) * 4, jnp.float32) if bias is None else bias.astype(jnp.float32)
        bias = jnp.where(full_rank(mask), full_rank(bias), lowest)
    if bias is not None:
        bias = full_rank(bias)
        if len(lead) > 1:
            bias = one_batch(jnp.broadcast_to(bias, (*lead, *bias.shape[-3:])))
    out = xsake.attention(*map(one_batch, (query, key, value)), bias=bias, **options)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)
