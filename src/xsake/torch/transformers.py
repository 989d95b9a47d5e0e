"""xsake as an attention of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from xsake.hads.selection.rules import Rules
from xsake.torch.crossing import DTYPES, say_once
from xsake.torch.masks import elements, said_by, tokens_mask
from xsake.torch.of_tensors import attention
from xsake.torch.sparse import NAMES, sparse_prompt
from xsake.torch.watched import is_watched, shown


def register(name: str = "xsake") -> None:
    """Enter xsake under a name, for `from_pretrained(..., attn_implementation=name)` and `set_attn_implementation`.

    The mask function is entered with it: without one transformers would hand over no padding and no windows.
    """
    NAMES.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, tokens_mask)


@torch.compiler.disable
def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention of transformers: query [B, H, T, D], keys and values [B, K, S, D]; gives ([B, T, H, D], None)."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if torch.is_autocast_enabled(query.device.type):  # rotary positions leave queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype in DTYPES else x for x in (query, key, value))
    q_length, kv_length = query.shape[2], key.shape[2]
    where, window, bias, sparse, is_plain = None, None, None, None, attention_mask is None and position_bias is None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        said = said_by(attention_mask, q_length, kv_length)
        where = said.where
        if said.has_window and sliding_window is None:
            raise ValueError(
                f"{type(module).__name__} has a mask with a window, and says to its attention no sliding_window: use "
                "another attn_implementation"
            )
        window, is_causal = sliding_window if said.has_window else None, True
        is_plain = position_bias is None and not said.is_packed and said.is_causal
        if is_plain:
            sparse = sparse_prompt(module, query, key, where, attention_mask, window)
    elif attention_mask is not None:
        bias, is_causal = _as_bias(attention_mask, kv_length), False
    elif q_length == 1:
        is_causal = False  # transformers' rule: a new token without a mask sees all
    elif is_causal and kv_length > q_length:  # and an empty static cache is one that nothing was written to
        key, value = key[:, :, :q_length], value[:, :, :q_length]
    if attention_mask is None and is_causal:
        sparse = sparse_prompt(module, query, key, None, None, None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
        if where is not None:
            bias, where, is_causal = bias + _as_bias(elements(where, window), kv_length), None, False
            window = None
    if dropout or query.dtype not in DTYPES or options.get("cache") is not None:
        what, refused = _why(dropout, query), {"softcap": softcap, "sinks (s_aux)": s_aux}
        if also := [name for name, value in refused.items() if value is not None]:
            raise NotImplementedError(f"{what} with {' and '.join(also)}: neither xsake nor torch's sdpa has it")
        say_once(f"{what} is computed by torch's sdpa, not by xsake")
        mask = attention_mask if where is None else elements(where, window)
        given = dict(dropout=dropout, scaling=scaling, is_causal=is_causal if where is None else False)
        return sdpa_attention_forward(module, query, key, value, mask, **given, position_bias=position_bias, **options)
    out = attention(
        query,
        key,
        value,
        where=where,
        bias=bias,
        is_causal=is_causal,
        scale=scaling,
        window=window,
        sinks=s_aux,
        soft_cap=softcap,
        sparse=sparse if bias is None else None,
    )
    if is_watched(module):
        rules = Rules(window, scaling)
        out = shown(module, query=query, key=key, value=value, out=out, rules=rules, is_causal=is_causal and is_plain)
    return out, None


def _as_bias(mask: torch.Tensor, kv_length: int) -> torch.Tensor:
    mask = mask[..., :kv_length]
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


def _why(dropout: float, query: torch.Tensor) -> str:
    if dropout:
        return f"dropout={dropout}"
    return f"{query.dtype}" if query.dtype not in DTYPES else "a paged cache of transformers"
