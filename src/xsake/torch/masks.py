"""What a model of transformers says of its tokens: a mask function that hands over positions and segments.

transformers asks for a mask once per forward, and gives every layer's attention what it gets. A mask of T x S elements
would be most of the work, and a new length a new program. So the mask is int32 [B, 1, rows, T + S]: the positions of
queries and keys, and their segments. One row more says that the mask has a window, two that sequences are packed, four
that it is not causal. It is data: no offset compiles anything. What is neither causality, a window, packing nor padding
stays a mask of elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from xsake.torch.of_tensors import PADDING, Where

_POSITIONS, _SEGMENTS = 0, 1
_ROWS, _WINDOW, _PACKED, _BOTH_WAYS = 2, 1, 2, 4  # rows; and more of them that say something
_AFTER_ALL = 1 << 30  # the position of a query that sees every key


class _Rule(NamedTuple):
    """A mask function, taken apart."""

    is_causal: bool = False
    has_window: bool = False
    segments: torch.Tensor | None = None  # [B, S]


def tokens_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """The mask function that is registered: None for plain causality, tokens as above, or a mask of elements."""
    rule = _rule_of(mask_function)
    if rule is None:
        given = dict(mask_function=mask_function, attention_mask=attention_mask, device=device)
        options |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **given, **options)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    is_plain = square and rule.is_causal and not rule.has_window and rule.segments is None
    # As for sdpa: the host looks at a prompt's padding once, and never at a new token's.
    if is_plain and q_length > 1 and (padding is None or bool(padding.all())):
        return None
    int32 = dict(dtype=torch.int32, device=device)
    k = (torch.arange(kv_length, **int32) + kv_offset).expand(batch_size, -1)  # type: ignore[call-overload]
    at = torch.arange(q_length, **int32) + q_offset  # type: ignore[call-overload]
    q = at.expand(batch_size, -1)
    segments = torch.zeros_like(k) if rule.segments is None else _of(rule.segments, k)
    q_segments = torch.zeros_like(q) if rule.segments is None else _of(rule.segments, q)
    if padding is not None:
        # Tokens of the padding attend nothing, and nothing attends to them.
        there = padding.to(device=device, dtype=torch.bool)
        segments = torch.where(_of(there, k), segments, PADDING)
        q_segments = torch.where(_of(there, q), q_segments, PADDING)
    if not rule.is_causal:
        q = torch.full_like(q, _AFTER_ALL)
    tokens = torch.stack([torch.cat([q, k], -1), torch.cat([q_segments, segments], -1)], 1)
    said = rule.has_window * _WINDOW + (rule.segments is not None) * _PACKED + (not rule.is_causal) * _BOTH_WAYS
    tokens = torch.cat([tokens, *[tokens[:, :1]] * said], 1)
    return tokens[:, None].to(torch.int32)


class Said(NamedTuple):
    """What a mask of tokens says."""

    where: Where
    has_window: bool
    is_packed: bool
    is_causal: bool


def said_by(mask: torch.Tensor, q_length: int, kv_length: int) -> Said:
    rows, tokens = mask.shape[-2:]
    if mask.shape[1] != 1 or not 0 <= rows - _ROWS <= _WINDOW + _PACKED + _BOTH_WAYS or tokens != q_length + kv_length:
        raise ValueError(
            f"the model handed on a mask {tuple(mask.shape)} that is not the one of its {q_length} queries and "
            f"{kv_length} keys: it cuts masks to a shape of its own; use another attn_implementation"
        )
    positions, segments = mask[:, 0, _POSITIONS], mask[:, 0, _SEGMENTS]
    q, k = slice(q_length), slice(q_length, None)
    where = Where(positions[:, q], positions[:, k], segments[:, q], segments[:, k])
    says = rows - _ROWS
    return Said(where, bool(says & _WINDOW), bool(says & _PACKED), not says & _BOTH_WAYS)


def elements(where: Where, window: int | None) -> torch.Tensor:
    """bool[B, 1, T, S]: the elements of a mask of tokens, for an attention that knows no such mask."""
    q, k = where.q_positions[:, :, None], where.k_positions[:, None]
    seen = (k <= q) & (where.q_segments[:, :, None] == where.k_segments[:, None]) & (where.k_segments >= 0)[:, None]
    if window is not None:
        seen &= q - k < window
    return seen[:, None]


def _of(per_slot: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries at these slots; the last entry for slots after it."""
    return per_slot.to(slots.device).gather(1, slots.long().clamp(0, per_slot.shape[1] - 1))


def _rule_of(mask_function: Callable) -> _Rule | None:
    """What transformers' own mask functions say, by the names of their closures; None if a part is unknown."""
    if mask_function is causal_mask_function:
        return _Rule(is_causal=True)
    if mask_function is bidirectional_mask_function:
        return _Rule()
    name = getattr(mask_function, "__qualname__", "").partition(".")[0]
    inside = inspect.getclosurevars(mask_function).nonlocals if callable(mask_function) else {}
    if name == "sliding_window_overlay":
        return _Rule(has_window=True)
    if name == "packed_sequence_mask_function":
        return _Rule(segments=inside["packed_sequence_mask"])
    if name != "and_masks":
        return None
    parts = [_rule_of(part) for part in inside["mask_functions"]]
    known = [part for part in parts if part is not None]
    segments = [part.segments for part in known if part.segments is not None]
    if len(known) < len(parts) or len(segments) > 1:
        return None
    return _Rule(
        any(part.is_causal for part in known), any(part.has_window for part in known), segments[0] if segments else None
    )
