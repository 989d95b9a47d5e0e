"""JAX's cuDNN attention is xsake's, and its tests run on four devices of the CPU."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from attend import attend
from jax._src import test_util
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    q_seqlen=None,
    kv_seqlen=None,
    q_offsets=None,
    kv_offsets=None,
    *,
    scale=1.0,
    mask_type=cudnn.MaskType.NO_MASK,
    dropout_rate=0.0,
    qkv_layout="BTNH",
    sliding_window_length=None,
    return_residual=False,
):
    if dropout_rate:
        raise NotImplementedError(f"{dropout_rate=}")
    if qkv_layout == "BNTH":
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    if q_offsets is None:
        padding = dict(query_seq_lengths=q_seqlen, key_value_seq_lengths=kv_seqlen)
    else:
        q_ids, kv_ids = segments(q_offsets, q_seqlen, query), segments(kv_offsets, kv_seqlen, key)
        padding = dict(segment_ids=(q_ids, kv_ids))
    out = attend(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=mask_type in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL),
        local_window_size=None if sliding_window_length is None else (sliding_window_length - 1, 0),
        return_lse=return_residual,
        **padding,
    )
    out, lse = out if return_residual else (out, None)
    if return_residual:
        return out, lse.swapaxes(1, 2)  # the test's sharding is of [batch, heads, length]
    return out.swapaxes(1, 2) if qkv_layout == "BNTH" else out


def segments(offsets, lengths, x):
    """cuDNN's packed sequences, each with its start and its length, as ids [batch, length]; -1 is padding."""
    index = jnp.arange(x.shape[1])[None, None]
    starts = offsets[:, :-1, None]
    inside = (starts >= 0) & (index >= starts) & (index < starts + lengths[:, :, None])
    return jnp.where(inside.any(1), inside.argmax(1), -1).astype(jnp.int32)


cudnn.dot_product_attention = dot_product_attention
cudnn.check_cudnn_version = lambda: 99999
test_util.run_on_devices = lambda *devices: lambda test: test
test_util.is_cuda_compute_capability_at_least = lambda capability: True
test_util.is_cuda_version_at_least = lambda *version: False
jax.devices()  # while the flag above is there
