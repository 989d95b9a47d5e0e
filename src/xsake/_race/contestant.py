"""Contestants in JAX: attention as our users call it, and dense attention as JAX has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax import Array

import xsake


def sparse(query: Array, key: Array, value: Array, mask: xsake.BlockMask) -> Array:
    return xsake.attention(query, key, value, mask)


def dense(by: str = "cudnn", *, is_causal: bool = True) -> Callable[..., Array]:
    return partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation=by)
