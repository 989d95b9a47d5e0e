"""`jax.nn.dot_product_attention` is xsake's, but for `implementation=None`, which the tests compare with."""

import jax
from attend import attend

of_jax = jax.nn.dot_product_attention


def dot_product_attention(query, key, value, bias=None, mask=None, *, implementation="xsake", **options):
    if implementation is None:
        return of_jax(query, key, value, bias, mask, **options)
    if not options.pop("return_residual", False):
        return attend(query, key, value, bias=bias, mask=mask, **options)
    out, lse = attend(query, key, value, bias=bias, mask=mask, return_lse=True, **options)
    # JAX's has the query's dtype and no gradient; xsake's is float32 and has one.
    return out, jax.lax.stop_gradient(lse.astype(query.dtype))


jax.nn.dot_product_attention = dot_product_attention
