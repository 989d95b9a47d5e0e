"""The one attention operation: validate, choose a backend and a configuration, run it, differentiate it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float, Int

from xsake._ground.device import platform_of
from xsake._ground.explicit import placed_like
from xsake._ground.programs import newest_programs
from xsake._ground.trace import known_flag, vary, varying_axes
from xsake._op import paged, registry
from xsake._op.arguments import build_call, check_inputs
from xsake._op.derivatives import differentiable_again, reverse_mode_only
from xsake._op.fold import Fold, mappable
from xsake._op.run import Runner
from xsake._op.shapes import Arrays, Output, Tokens
from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts, of_live_rows, sink_gradient
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Window


def attention(
    query: Float[Arrays, "B T H D"],
    key: Float[Arrays, "_B _S K D"],
    value: Float[Arrays, "_B _S K Dv"],
    mask: BlockMask | None = None,
    *,
    bias: Float[Arrays, "#B #H #T _S"] | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    query_seq_lengths: Int[Arrays, "B"] | None = None,
    key_value_seq_lengths: Int[Arrays, "B"] | None = None,
    segment_ids: Tokens | None = None,
    positions: Tokens | None = None,
    page_table: Int[Arrays, "B n"] | None = None,
    sinks: Float[Arrays, "H"] | Float[Arrays, "H sinks"] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    """Block-sparse attention; with no mask, dense. Names and layout are those of `jax.nn.dot_product_attention`.

    An element attends iff its block is in the mask, the mask's rule and the call's rules hold, and its segments agree.
    A query that attends nothing gives 0 (and lse -inf), with gradients 0.

    Args:
      query: [B, T, H, D]; H must be a multiple of K (grouped heads). Query, key and value have one dtype.
      key: [B, S, K, D].
      value: [B, S, K, Dv].
      mask: a `BlockMask` for T x S; its batch is 1 or B, its heads are 1, K or H.
      bias: added to the scaled logits; broadcasts from [B|1, H|1, T|1, S|1].
      scale: factor of the logits; D ** -0.5 by default.
      is_causal: a query attends keys at its own index and before, counted from the top left as in jax.nn; `positions`,
        if given, replace the indices.
      local_window_size: the largest distance of a key, inclusive: an int for both sides or (left, right), None (or
        2**30 and more) for no limit.
      query_seq_lengths, key_value_seq_lengths: i32[B]; tokens at or past the length are padding, whatever they hold.
      segment_ids: i32[B, T], or a (query, key) pair; only equal ids attend, and a negative id is padding.
      positions: i32[B, T], or a (query, key) pair; causality and windows use them instead of indices (for a cache, or
        for reordered tokens). Any int32 is one, and distances do not wrap; on TPUs -2**31 and 2**31 - 1 count as their
        neighbours.
      page_table: i32[B, n], for a cache in pages: key and value are [pages, page, K, D], and S is n * page. Page
        `page_table[b, i]` holds tokens from i * page on of sequence b; entries at or past `key_value_seq_lengths` may
        be anything. Pages are read in place, and what lies behind a sequence's end may be NaN. Forward only. A page
        that does not exist is an error, or NaN if the table is traced. "xla" takes pages of any size, "triton"
        multiples of 16 tokens, "mosaic_gpu" multiples of 64 with head dimensions that it does not pad, "mosaic_tpu"
        multiples of 128 and of the mask's block with head_dim a multiple of 128.
      sinks: [H] or [H, n] raw logits that take part in every row's softmax, with a value of 0.
      logits_soft_cap: c * tanh(logits / c), after the bias.
      return_lse: also return the log of the softmax denominator, float32[B, T, H], differentiable.
      deterministic: the same bits in every run. False lets an implementation add up in any order: the gradients of long
        sequences are a few percent faster on Hopper GPUs, and nothing changes elsewhere.
      implementation: None for the best one that supports the call; a named one runs or raises, and never falls back.
      config: the implementation's own `Config`; None for the configuration that was tuned for such calls on this device
        (`xsake.tuning_db`), or else for the heuristic's.

    Returns:
      [B, T, H, Dv] in the query's dtype, or (output, lse).

    Derivatives are taken in reverse mode (jax.grad, jax.vjp). The "xla" implementation has second derivatives too,
    forward over reverse (jax.hessian, jax.jvp of jax.grad), and takes a symbolic batch size of `jax.export`.

    >>> import jax, xsake
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 256, 4, 64))
    >>> mask = xsake.patterns.sink_window(256, 256, sink=64, window=64, block_q=64, block_kv=64)
    >>> xsake.attention(q, k, v, mask).shape
    (1, 256, 4, 64)
    """
    return_lse = known_flag("return_lse", return_lse)
    described: dict[str, Any] = dict(
        bias=bias,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        positions=positions,
        sinks=sinks,
        logits_soft_cap=logits_soft_cap,
        deterministic=deterministic,
    )
    if page_table is not None:
        where: dict[str, Any] = dict(implementation=implementation, config=config)
        out, lse = paged.attention(query, key, value, mask, page_table, **where, **described)
        return (out, lse) if return_lse else out
    check_inputs(query, key, value)
    # `asarray` of a traced array is traced, too, and gradients outside jit wait for the host.
    query, key, value = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (query, key, value))
    names = registry.candidates(implementation, platform_of(query))
    call = build_call(
        query,
        key,
        value,
        mask,
        **described,
        default_blocks=registry.get(names[0]).default_blocks(query.shape[1], key.shape[1], query.shape[3]),
    )
    runner = Runner.of(names, call, config)
    out, lse = _attend(runner, vary(reverse_mode_only(call), varying_axes(call)))
    if call.q_segments is not None:
        out = jnp.where((call.q_segments >= 0)[:, :, None, None], out, 0)  # this also drops the cotangent of padding
    out = placed_like(query, out)
    return (out, placed_like(query, runner.contract_lse(lse).swapaxes(1, 2))) if return_lse else out


# One program also outside jit: between separate programs jax_debug_infs would report every -inf.
@newest_programs
def _mappable_forward(runner: Runner) -> Callable:
    run = mappable(partial(runner.forward, wide=True))
    return _differentiable_again(runner, run, partial(_plain(runner).forward, wide=True))


def _mappable_backward(runner: Runner, with_bias: bool) -> Callable:
    def backward(call: Call, lse: Array, delta: Array | DeltaParts, d_out: Array) -> tuple:
        return runner.backward(call, lse, delta, d_out, with_bias)

    run = custom_vmap(backward)

    @run.def_vmap
    def _(size: int, mapped: list, call: Call, *rest: Any) -> tuple:
        fold = Fold.of(size, call, mapped[0])
        folded = fold.call(call, mapped[0])
        if call.bias is not None and with_bias:  # each example has its own bias gradient
            folded = dataclasses.replace(folded, bias=fold.array(call.bias, mapped[0].bias))
        rest = jax.tree.map(fold.array, rest, tuple(mapped[1:]))
        grads = [fold.back(g) for g in run(folded, *rest)]
        if call.bias is not None and with_bias and call.bias.shape[1 if mapped[0].bias else 0] == 1:
            grads[3] = grads[3].sum(1, keepdims=True)
        return tuple(grads), (True,) * len(grads)

    def plain(call: Call, lse: Array, delta: Array, d_out: Array) -> tuple:
        return _plain(runner).backward(call, lse, delta, d_out, with_bias)

    return _differentiable_again(runner, run, plain)


def _plain(runner: Runner) -> Runner:
    """With derivatives, which custom_partitioning does not have."""
    return dataclasses.replace(runner, by_compiler=False)


def _differentiable_again(runner: Runner, run: Callable, plain: Callable) -> Callable:
    return differentiable_again(run, plain if runner.implementation == "xla" else None, runner.implementation)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    bias: bool


_DIFFERENTIABLE = ("query", "key", "value", "bias", "sink_lse")  # the fields of `Call` that `_gradients` serves


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(runner: Runner, call: Call) -> tuple[Array, Array]:
    out, lse = _mappable_forward(runner)(call)
    return out.astype(call.query.dtype), lse


def _attend_fwd(runner: Runner, primals: Any) -> tuple:
    call: Call = jax.tree.map(lambda p: p.value, primals)
    if not call.mask.has_transpose:
        raise ValueError(
            "mask was built with transpose=False, for inference only; gradients need its transposed lists: "
            "build it with transpose=True"
        )
    for field in call.array_fields():
        perturbed = any(
            p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact)
            for p in jax.tree.leaves(getattr(primals, field.name))
        )
        if perturbed and field.name not in _DIFFERENTIABLE:
            raise NotImplementedError(f"attention has no gradient with respect to {field.name}")
    out, lse = _mappable_forward(runner)(call)
    wanted = _Wanted(bias=call.bias is not None and primals.bias.perturbed)
    return (out.astype(call.query.dtype), lse), (call, out, lse, wanted)


def _attend_bwd(runner: Runner, residuals: tuple, cotangents: tuple) -> tuple[Call]:
    call, out, lse, wanted = residuals
    d_out, d_lse = cotangents
    d_out = jnp.zeros(d_out.shape, d_out.dtype) if isinstance(d_out, SymbolicZero) else d_out
    d_lse = None if isinstance(d_lse, SymbolicZero) else d_lse
    zeros = jax.tree.map(lambda _: None, call)
    found = _gradients(runner, wanted.bias)(call, out, lse, d_out, d_lse)
    return (dataclasses.replace(zeros, **{name: placed_like(getattr(call, name), x) for name, x in found.items()}),)


@newest_programs
def _gradients(runner: Runner, with_bias: bool) -> Callable:
    """A function that returns the gradients, by the names of `Call`'s fields."""

    def gradients(call: Call, out: Array, lse: Array, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
        d_out, d_lse = vary((d_out, d_lse), varying_axes(call))
        lse = runner.contract_lse(lse)
        parts, backward = DeltaParts(out, d_lse), _mappable_backward(runner, with_bias)
        if runner.takes_delta_parts and call.sink_lse is None and not with_bias:
            return dict(zip(("query", "key", "value"), backward(call, lse, parts, d_out), strict=True))
        delta = parts.summed(lse, d_out)
        grads = backward(call, lse, of_live_rows(call.q_segments, lse, delta), d_out)
        found = dict(zip(("query", "key", "value", "bias"), grads, strict=False))
        if call.sink_lse is not None:
            found["sink_lse"] = sink_gradient(call.sink_lse, lse, delta)
        return found

    return gradients


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
