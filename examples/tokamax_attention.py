"""xsake as an implementation of tokamax's attention: needs pip install tokamax.

python examples/tokamax_attention.py

`tokamax.dot_product_attention` takes functions in `implementation`, beside names, and tries them in turn: a function
that raises NotImplementedError leaves the call to the next.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tokamax
from tokamax._src.ops.attention import base

import xsake


def on_xsake(query, key, value, *, bias, mask, logits_scale, precision, logits_soft_cap, q_sharding, block_mask=None):
    """For `implementation`. xsake multiplies at the highest precision, which satisfies any `precision`."""
    if q_sharding is not None or query.ndim != 4 or not all(isinstance(x, jax.Array) for x in (query, key, value)):
        raise NotImplementedError("q_sharding, quantised arrays, and other than one dimension of batch")
    mask, causal, q_end, k_end = mask.take("causal_mask", "q_end", "k_end")
    window = None
    if causal is not None:  # keys of q + offset - window_size + 1 to q + offset
        left = None if causal.window_size is None else causal.window_size - 1 - causal.offset
        window = (left, causal.offset)
        if any(side is not None and (not isinstance(side, int) or side < 0) for side in window):
            raise NotImplementedError(f"{causal} does not include the query's own key")
    rest = mask.as_array(query.shape[1], key.shape[1])
    added = [x for x in (bias, None if rest is None else jnp.where(rest, 0.0, -jnp.inf)) if x is not None]
    return xsake.attention(
        query,
        key,
        value,
        block_mask,
        bias=sum(x.reshape((1,) * (4 - x.ndim) + x.shape) for x in added) if added else None,
        scale=None if logits_scale is base.AUTO else logits_scale,
        local_window_size=window,
        query_seq_lengths=None if q_end is None else jnp.broadcast_to(q_end.reshape(-1), query.shape[:1]),
        key_value_seq_lengths=None if k_end is None else jnp.broadcast_to(k_end.reshape(-1), query.shape[:1]),
        logits_soft_cap=logits_soft_cap,
    )


def main():
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (2, 128, n, 32)) for key, n in zip(keys[:3], (4, 2, 2), strict=True))
    bias = jax.random.normal(keys[3], (2, 4, 128, 128))
    allowed = jax.random.bernoulli(keys[4], 0.7, (2, 1, 128, 128)) | jnp.eye(128, dtype=bool)
    calls = {
        "causal": dict(is_causal=True),
        "a window, a cap, a scale": dict(is_causal=True, local_window_size=(20, 0), logits_soft_cap=5.0, scale=0.3),
        "a bias and a mask": dict(bias=bias, mask=allowed, is_causal=True),
        "lengths of keys": dict(key_value_seq_lengths=jnp.array([128, 70])),
    }
    for name, call in calls.items():

        def values(implementation, call=call):
            def loss(q, k, v):
                out = tokamax.dot_product_attention(q, k, v, **call, implementation=implementation)
                return (out * jnp.cos(jnp.arange(32.0))).sum(), out

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

        worst = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), values([on_xsake])[1], values("xla")[1])
        assert max(worst) < 2e-5, worst
        print(f"tokamax {tokamax.__version__}, gradients of {name}: {max(worst):.1e}")

    window = xsake.patterns.sink_window(128, 128, sink=16, window=32, block_q=16, block_kv=16)
    sparse = [partial(on_xsake, block_mask=window), "xla"]
    out = tokamax.dot_product_attention(q, k, v, is_causal=True, implementation=sparse)
    np.testing.assert_allclose(out, xsake.attention(q, k, v, window), atol=1e-6)


if __name__ == "__main__":
    main()
