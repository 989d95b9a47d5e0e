"""ejkernel's block-sparse attention is xsake's; its dense attention, which the tests compare with, is its own."""

from attend import attend
from ejkernel.kernels._xla import blocksparse_attention as theirs


def blocksparse_attention(
    query,
    key,
    value,
    *,
    q_segment_ids=None,
    kv_segment_ids=None,
    softmax_aux=None,
    softmax_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    causal=True,
):
    """`xsake.attention` with the arguments that the tests use, and heads before tokens."""
    out = attend(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        segment_ids=None if q_segment_ids is None else (q_segment_ids, kv_segment_ids),
        sinks=softmax_aux,
        scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        local_window_size=sliding_window,
        is_causal=causal,
    )
    return out.swapaxes(1, 2)


theirs.blocksparse_attention = blocksparse_attention
