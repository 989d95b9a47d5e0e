"""`xsake.attention` for torch tensors, with gradients, in few compiled programs.

A program is compiled for every shape. So tokens are padded to `bucket` lengths, and what differs between calls of one
shape (an offset into a cache, which tokens are padding) is data: positions and segments of a `Where`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch.nn import functional

import xsake
from xsake.hads.attention.attention import Attention
from xsake.torch.crossing import DTYPES, check_device, keep_a_while, to_jax, to_torch

_UNIT = 64  # tokens
PADDING = -1  # the segment of a token that is not there


class Where(NamedTuple):
    """What the tokens of a call are: int32 tensors of queries [B, T] and of keys [B, S].

    Only equal segments attend, and a query attends keys whose position is not after its own.
    """

    q_positions: torch.Tensor
    k_positions: torch.Tensor
    q_segments: torch.Tensor
    k_segments: torch.Tensor


class Sparse(NamedTuple):
    """A prompt that HADS reads, or a chunk of it: the function and the layer's number.

    `text` is where each sequence's text begins and ends, int32 [B], and its tokens' segments, int32 [B, T]; None where
    all is text and no padding is added: where gradients are taken, and where the length is a bucket's. The queries are
    tokens from `start` on; a later chunk has all keys before it, and no padding before its texts.
    """

    attention: Attention
    layer: int
    text: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    start: int = 0


class _Static(NamedTuple):
    """What a program is compiled for, beside shapes."""

    hads: Attention | None
    layer: int | None  # of a model whose layers are not alike; else its number is data
    start: int  # of a chunk that HADS reads
    is_causal: bool
    scale: float | None
    window: int | None
    soft_cap: float | None
    implementation: str | None
    tokens_first: tuple[bool, bool, bool]  # of query, key and value: [B, T, H, D], else [B, H, T, D]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    where: Where | None = None,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sparse: Sparse | None = None,
) -> torch.Tensor:
    """[B, T, H, Dv] from query [B, H, T, D], key [B, K, S, D] and value [B, K, S, Dv], as models of transformers have
    them; H must be a multiple of K.

    Args:
      where: the tokens' positions and segments. Without it, they are numbered from the first one.
      bias: added to the scaled logits; broadcasts from [B|1, H|1, T, S].
      is_causal: a query attends keys that are not after it.
      scale: of the logits; D ** -0.5 by default.
      window: with `is_causal`, a query attends itself and the `window - 1` tokens before it.
      sinks: [H] logits that take part in every row's softmax with a value of 0.
      soft_cap: c * tanh(logits / c).
      sparse: of a prompt or a chunk that HADS reads, in place of `where`.
    """
    _check(query, key, value, [x for x in (bias, sinks, *(where or ())) if x is not None])
    q_len, k_len = query.shape[2], key.shape[2]
    # Keys after the last query are never seen; elsewhere segments tell which keys are padding.
    if where is None and not (is_causal and q_len == k_len) and bucket(k_len) != k_len and bias is None:
        where = _numbered(query, k_len, is_causal)
        is_causal = True
    if sparse is not None:
        where = None
        if not sparse.start:
            key, value, k_len = key[:, :, :q_len], value[:, :, :q_len], q_len
    keeps_length = bias is not None or (sparse is not None and sparse.text is None)
    q_more, k_more = (0 if keeps_length else bucket(n) - n for n in (q_len, k_len))
    if sparse is not None and sparse.text is not None:
        begins, ends, segments = sparse.text
        segments = functional.pad(segments, (0, q_more), value=PADDING).contiguous()
        sparse = sparse._replace(text=(begins, ends, segments))
        if sparse.start:
            k_more = max(sparse.start + q_len + q_more - k_len, 0)
    padded = [_padded(x, more) for x, more in ((query, q_more), (key, k_more), (value, k_more))]
    layer = sparse.layer if sparse is not None and sparse.attention.profile.windowed else None
    static = _Static(
        sparse and sparse.attention,
        layer,
        0 if sparse is None else sparse.start,
        is_causal,
        scale,
        window,
        soft_cap,
        _implementation(query.device.type),
        tuple(first for _, first in padded),  # type: ignore[arg-type]
    )
    if where is not None:
        where = Where(
            *(functional.pad(x, (0, more)) for x, more in zip(where[:2], (q_more, k_more), strict=True)),
            *(functional.pad(x, (0, more), value=PADDING) for x, more in zip(where[2:], (q_more, k_more), strict=True)),
        )
    tensors = [*(x for x, _ in padded), sinks, None]
    if bias is not None and bias.requires_grad:
        bias, tensors[-1] = None, bias
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        out = _Attention.apply(static, where, bias, sparse, *tensors)
    else:
        known, given = _arrays(static, where, bias, sparse, tensors)
        array = _forward(static, known, given)
        keep_a_while(2 * query.nbytes, (known, given, array))
        out = to_torch(array)
    return out[:, :q_len] if q_more else out


def bucket(tokens: int) -> int:
    """The padded length: one token, or in steps of 64 tokens and at most an eighth."""
    if tokens == 1:
        return 1
    step = max(_UNIT, 1 << max((tokens - 1).bit_length() - 4, 0))
    return -(-tokens // step) * step


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: list[torch.Tensor]) -> None:
    if query.dtype not in DTYPES:
        raise ValueError(f"xsake computes in float32, bfloat16 and float16, and the query is {query.dtype}: convert it")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must be of one dtype, and are {query.dtype}, {key.dtype} and {value.dtype}: convert "
            "them"
        )
    if any(x.device != query.device for x in (key, value, *more)):
        devices = sorted({str(x.device) for x in (query, key, value, *more)})
        raise ValueError(f"all tensors must be on one device, and are on {devices}")
    check_device(query.device)


def _numbered(query: torch.Tensor, k_len: int, is_causal: bool) -> Where:
    b, q_len = query.shape[0], query.shape[2]
    k = torch.arange(k_len, dtype=torch.int32, device=query.device).expand(b, -1)
    q = k.new_full((b, q_len), k_len) if not is_causal else torch.arange(q_len, dtype=torch.int32, device=k.device)
    q = q.expand(b, -1)
    return Where(q, k, torch.zeros_like(q), torch.zeros_like(k))


def _padded(x: torch.Tensor, more: int) -> tuple[torch.Tensor, bool]:
    """The tensor with more tokens, and whether the memory of [B, H, T, D] is that of [B, T, H, D]."""
    x = functional.pad(x, (0, 0, 0, more)) if more else x
    if x.is_contiguous():
        return x, False
    first = x.transpose(1, 2).is_contiguous()
    return (x if first else x.contiguous()), first


@lru_cache
def _implementation(platform: str) -> str | None:
    """While JAX traces, it knows no device but its default one."""
    return "xla" if platform == "cpu" and jax.default_backend() != "cpu" else None


def _arrays(
    static: _Static, where: Where | None, bias: Any, sparse: Sparse | None, tensors: Sequence[Any]
) -> tuple[dict[str, Any], tuple[Array | None, ...]]:
    """What a program gets: the query waits for torch, and so for all."""
    given = tuple(
        None if x is None else to_jax(x.transpose(1, 2) if first else x.contiguous(), waits=not number)
        for number, (x, first) in enumerate(zip(tensors, (*static.tokens_first, False, False), strict=True))
    )
    ready = partial(to_jax, waits=False)
    known: dict[str, Any] = {
        "where": None if where is None else tuple(ready(x.contiguous()) for x in where),
        "bias": None if bias is None else ready(bias.contiguous()),
    }
    if sparse is not None:
        known["sparse"] = _number(sparse.layer), sparse.text and tuple(ready(x) for x in sparse.text)
    return known, given


@lru_cache
def _number(layer: int) -> Array:
    return jnp.int32(layer)


class _Attention(torch.autograd.Function):
    """One call of JAX forward and one backward. The backward's residuals stay in JAX."""

    @staticmethod
    def forward(
        ctx: Any, static: _Static, where: Where | None, bias: Any, sparse: Sparse | None, *tensors: Any
    ) -> torch.Tensor:
        known, given = _arrays(static, where, bias, sparse, tensors)
        ctx.static = static
        out, ctx.backward_of = _forward_and_backward(static, known, given)
        keep_a_while(2 * tensors[0].nbytes, (known, given, out))
        return to_torch(out)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("xsake.torch has no second derivatives: leave out create_graph=True")
        (cotangent,) = cotangents
        down = to_jax(cotangent.contiguous())
        found = _backward(ctx.backward_of, down)
        keep_a_while(3 * cotangent.nbytes, (down, found))
        gradients = [None if x is None else to_torch(x) for x in found]
        first = (*ctx.static.tokens_first, False, False)
        return (
            None,
            None,
            None,
            None,
            *(x.transpose(1, 2) if x is not None and at else x for x, at in zip(gradients, first, strict=True)),
        )


def _attend(static: _Static, known: dict[str, Any], given: tuple[Any, ...]) -> Array:
    *qkv, sinks, bias = given
    query, key, value = (x if at else x.swapaxes(1, 2) for x, at in zip(qkv, static.tokens_first, strict=True))
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    options: dict[str, Any] = {"scale": static.scale, "sinks": sinks, "logits_soft_cap": static.soft_cap}
    options["implementation"] = static.implementation
    if static.hads is not None:
        layer, text = known["sparse"]
        if static.window is not None:
            options["local_window_size"] = (static.window - 1, 0)
        if static.start:
            options |= {"start": static.start, "lengths": text[1]}
        elif text is not None:
            options |= dict(zip(("left_padding", "lengths", "segment_ids"), text, strict=True))
        layer = layer if static.layer is None else static.layer
        return static.hads(query, key, value, layer=layer, is_causal=True, **options)  # type: ignore[no-any-return]
    if known["where"] is not None:
        q_positions, k_positions, q_segments, k_segments = known["where"]
        options |= {"positions": (q_positions, k_positions), "segment_ids": (q_segments, k_segments)}
    return xsake.attention(
        query,
        key,
        value,
        bias=known["bias"] if bias is None else bias,
        is_causal=static.is_causal,
        local_window_size=None if static.window is None else (static.window - 1, 0),
        **options,
    )


@partial(jax.jit, static_argnums=0)
def _forward(static: _Static, known: dict[str, Any], given: tuple[Any, ...]) -> Array:
    return _attend(static, known, given)


@partial(jax.jit, static_argnums=0)
def _forward_and_backward(static: _Static, known: dict[str, Any], given: tuple[Any, ...]) -> tuple[Array, Any]:
    return jax.vjp(partial(_attend, static, known), given)


@jax.jit
def _backward(backward_of: Any, cotangent: Array) -> tuple[Array | None, ...]:
    (found,) = backward_of(cotangent)
    return found
