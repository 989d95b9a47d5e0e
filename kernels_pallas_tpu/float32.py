"""Float32: a call in float32 in place of one in float16, for which TPUs have no arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call


class Float32(Rewrite):
    @classmethod
    def of(cls, call: Call) -> Float32 | None:
        return cls(call) if call.query.dtype == jnp.float16 else None

    @property
    def call(self) -> Call:
        given = self.given
        query, key, value = (x.astype(jnp.float32) for x in (given.query, given.key, given.value))
        return dataclasses.replace(given, query=query, key=key, value=value)

    def results(self, out: Array, lse: Array) -> tuple[Array, Array]:
        return out.astype(jnp.float16), lse

    def statistics(self, lse: Array, delta: Any, d_out: Array) -> tuple[Array, Any, Array]:
        return lse, delta, d_out.astype(jnp.float32)

    def gradients(self, *grads: Array) -> tuple[Array, Array, Array]:
        d_query, d_key, d_value = (x.astype(jnp.float16) for x in grads)
        return d_query, d_key, d_value
