"""tokamax's tests of any attention function, of xsake."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from attend import attend
from tokamax._src.ops.attention import base

sys.path.append(str(Path(__file__).parents[2] / ".peers/tokamax/tokamax/_src/ops/attention"))
import test_base


def attention(
    q,
    k,
    v,
    *,
    precision=None,
    bias=None,
    mask=None,
    is_causal=False,
    q_indices=None,
    k_indices=None,
    logits_scale=None,
    logits_dtype=None,
    logits_soft_cap=None,
    normalize_output=True,
    return_residuals=False,
    **unknown,
):
    """`xsake.attention` with tokamax's arguments."""
    if unknown:
        raise NotImplementedError(f"no argument of xsake.attention: {', '.join(unknown)}")
    if logits_dtype not in (None, jnp.float32):
        raise NotImplementedError(f"{logits_dtype=}: logits are float32")
    if not normalize_output and not return_residuals:
        raise NotImplementedError("normalize_output=False: the sum that divides an output is not given back alone")
    jax.lax.Precision(precision)  # the highest satisfies every one
    if any(not isinstance(x, jax.Array) for x in (q, k, v)):
        raise TypeError("xsake.attention takes arrays, no quantised ones")
    if not isinstance(mask, base.Mask):
        mask = base.Mask(causal_mask=mask) if isinstance(mask, base.CausalMask) else base.Mask(mask)
    if is_causal:
        mask &= base.CausalMask()
    indices = [jnp.arange(x.shape[-3])[None] if at is None else at for x, at in ((q, q_indices), (k, k_indices))]
    mask, options = native(mask, q.shape[0], by_index=q_indices is None and k_indices is None)
    if q_indices is not None or k_indices is not None:
        options["positions"] = tuple(indices)
    out, lse = attend(
        q,
        k,
        v,
        bias=bias,
        mask=mask.as_array(*indices),
        scale=logits_scale,
        logits_soft_cap=logits_soft_cap,
        return_lse=True,
        **options,
    )
    # tokamax's residuals are a row's maximum and its sum of exponentials above that: a sum of 1 above its logsumexp.
    lse = lse.swapaxes(-1, -2)
    return (out, (lse, jnp.ones_like(lse))) if return_residuals else out


def native(mask, batch, by_index):
    """The rest of a tokamax mask, which becomes a bias, and what xsake has arguments for."""
    options = {}
    causal = mask.causal_mask
    if causal is not None and causal.offset == 0:
        mask, _ = mask.take("causal_mask")
        options["is_causal"] = True
        if causal.window_size is not None:
            options["local_window_size"] = (causal.window_size - 1, 0)
    for name, argument in (("q_end", "query_seq_lengths"), ("k_end", "key_value_seq_lengths")):
        ends = getattr(mask, name)
        if by_index and ends is not None and ends.shape == (batch, 1, 1):
            mask, _ = mask.take(name)
            options[argument] = ends[:, 0, 0]
    return mask, options


class TestXsake(test_base.AttentionTestBase):
    def __init__(self, *args):
        super().__init__(*args, attention_fn=attention, supports_dropout=False, supports_logits_dtype=False)
