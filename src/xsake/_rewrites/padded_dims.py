"""PaddedDims: head dimensions filled up with zeros, which change no product, to those that kernels have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call


class PaddedDims(Rewrite):
    """`dims`: the head dimensions of the kernels, in rising order. The dimension of values may have another."""

    def __init__(self, given: Call, dims: Sequence[int]) -> None:
        super().__init__(given)
        self.dims = dims

    @classmethod
    def of(cls, call: Call, dims: Sequence[int]) -> PaddedDims | None:
        return None if {call.head_dim, call.value_dim} <= set(dims) else cls(call, dims)

    @property
    def call(self) -> Call:
        given = self.given
        query, key, value = (self._padded(x) for x in (given.query, given.key, given.value))
        return dataclasses.replace(given, query=query, key=key, value=value)

    def results(self, out: Array, lse: Array) -> tuple[Array, Array]:
        return out[..., : self.given.value_dim], lse

    def statistics(self, lse: Array, delta: Any, d_out: Array) -> tuple[Array, Any, Array]:
        return lse, delta, self._padded(d_out)

    def gradients(self, d_query: Array, d_key: Array, d_value: Array) -> tuple[Array, Array, Array]:
        dim = self.given.head_dim
        return d_query[..., :dim], d_key[..., :dim], d_value[..., : self.given.value_dim]

    def _padded(self, x: Array) -> Array:
        dim = next(dim for dim in self.dims if x.shape[-1] <= dim)
        return x if dim == x.shape[-1] else jnp.pad(x, ((0, 0),) * 3 + ((0, dim - x.shape[-1]),))
