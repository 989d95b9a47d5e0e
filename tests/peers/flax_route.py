"""nnx's attention layers attend with `xsake.model.attention_fn`; linen's, which the tests compare with, do not."""

from flax import nnx
from flax.nnx.nn import attention

from xsake.model import attention_fn


def dot_product_attention(*arguments, promote_dtype=None, **options):
    return attention_fn(*arguments, **options)


attention.dot_product_attention = nnx.dot_product_attention = dot_product_attention
nnx.MultiHeadAttention.__init__.__kwdefaults__["attention_fn"] = dot_product_attention
