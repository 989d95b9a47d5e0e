"""Runner: what runs a call, by a backend and a configuration, on the devices that the call is cut over."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.device import platform_of
from xsake._ground.trace import interpret, interpreting, vary, varying_axes
from xsake._op import registry, tuned
from xsake._op.partition import over_mesh
from xsake._rewrites.dims import call_dims
from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts


def resolve_config(name: str, call: Call, config: Any) -> Any:
    backend = registry.get(name)
    known = isinstance(call.batch, int)  # tuning is keyed by sizes: a symbolic batch has none
    if known:
        tuned.announce(name, call)
    if config is None:
        return tuned.choose(name, call).config if known else backend.default_config(call)
    if not isinstance(config, backend.Config):
        raise TypeError(
            f"config must be a {backend.Config.__module__}.{backend.Config.__qualname__} for implementation {name!r}; "
            f"got {type(config).__module__}.{type(config).__qualname__}"
        )
    return config


def _holds(dtype: Any, other: Any) -> bool:
    """Whether every number of type `other` has one of type `dtype`."""
    return jnp.issubdtype(dtype, jnp.floating) and (dtype == other or dtype.itemsize > other.itemsize)


_LOWEST = float(np.finfo(np.float32).min)


@partial(jax.jit, inline=True)
def _with_infinity(lse: Array) -> Array:
    return jnp.where(lse == _LOWEST, -jnp.inf, lse)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs a call, by everything that is decided while tracing."""

    implementation: str
    config: Any
    chosen: bool  # XSAKE chose the configuration: a device's part of the call may get another
    size: tuple  # batch, query heads and keys of the call that the configuration is for
    by_compiler: bool  # arrays on auto mesh axes are cut by custom_partitioning
    interpret: bool
    finite_lse: bool  # jax_debug_infs would report the -inf that the operation keeps for an empty row

    @classmethod
    def of(cls, names: list[str], call: Call, config: Any) -> Runner:
        """The best of the named implementations for a call; `config` is the caller's, or None."""
        name = registry.choose(names, call)
        return cls(
            implementation=name,
            config=resolve_config(name, call, config),
            chosen=config is None,
            size=(call.batch, call.q_heads, call.kv_len),
            # On TPUs it does not work (jax issue 38196): a kernel that meets such arrays names shard_map and stops.
            # Nor can it hold what an interpreted kernel does to the outside.
            by_compiler=platform_of(call.query) != "tpu" and not interpreting(),
            interpret=interpreting(),
            finite_lse=bool(jax.config.jax_debug_infs),
        )

    def forward(self, call: Call, *, wide: bool = False) -> tuple[Array, Array]:
        """(output, lse). The output has the query's dtype, or with `wide` the one that the backend has at hand."""
        dims = call_dims(call)
        batch, tokens, heads, _ = dims.query
        results = ((batch, tokens, heads, dims.value[3]), (batch, heads, tokens))
        out, lse = over_mesh(self.run_forward, (call,), (dims,), results, by_compiler=self.by_compiler)
        return out if wide else out.astype(call.query.dtype), lse

    def run_forward(self, call: Call) -> tuple[Array, Array]:
        with interpret(self.interpret):
            found = registry.get(self.implementation).forward(call, self._config(call))
        out, lse = self._several(found, "out", "lse")
        batch, tokens, heads, _ = call.query.shape
        self._expect("out", out, (batch, tokens, heads, call.value_dim), wider_than=call.query.dtype)
        self._expect("lse", lse, (batch, heads, tokens), wider_than=jnp.dtype("float32"))
        if self.finite_lse:
            lse = jnp.maximum(lse, _LOWEST)
        return vary((out, lse), varying_axes(call))  # the types of a kernel's outputs may lack these axes

    def _several(self, found: Any, *names: str) -> tuple:
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            given = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise TypeError(f"implementation {self.implementation!r} gave {given}; it must give {', '.join(names)}")
        return tuple(found)

    def _expect(
        self, what: str, found: Any, shape: tuple, *, dtype: Any = None, wider_than: jnp.dtype | None = None
    ) -> None:
        """Refuse what a backend must not give, by the backend's name, before JAX meets it somewhere else."""
        given = (getattr(found, "shape", None), getattr(found, "dtype", None))
        fits = given[1] == dtype if wider_than is None else given[1] is not None and _holds(given[1], wider_than)
        if given[0] != shape or not fits:
            must = dtype if wider_than is None else f"{wider_than} or wider"
            raise TypeError(
                f"implementation {self.implementation!r} gave {what} as {list(given[0] or ())} in {given[1]}; "
                f"it must be {list(shape)} in {must}"
            )

    def _config(self, call: Call) -> Any:
        """The configuration of a call, or of a device's part of it."""
        if not self.chosen or (call.batch, call.q_heads, call.kv_len) == self.size:
            return self.config
        return tuned.choose(self.implementation, call).config

    def contract_lse(self, lse: Array) -> Array:
        """The lse as users see it: -inf for an empty row."""
        return _with_infinity(lse) if self.finite_lse else lse

    def backward(self, call: Call, lse: Array, delta: Array | DeltaParts, d_out: Array, with_bias: bool) -> tuple:
        """Gradients of query, key and value and, if asked for, of the bias."""
        dims = call_dims(call)
        batch, tokens, heads, _ = dims.query
        rows = (batch, heads, tokens)
        outputs = (batch, tokens, heads, dims.value[3])
        of_delta: Any = rows
        if isinstance(delta, DeltaParts):
            of_delta = (outputs, None if delta.d_lse is None else rows)
        given_dims = (dims, rows, of_delta, outputs)
        wanted = ("query", "key", "value", "bias")[: 4 if with_bias else 3]
        results = tuple(getattr(dims, name) for name in wanted)
        run = partial(self.run_backward, with_bias)
        return over_mesh(run, (call, lse, delta, d_out), given_dims, results, by_compiler=self.by_compiler)

    @property
    def takes_delta_parts(self) -> bool:
        return "delta_parts" in registry.get(self.implementation).HONOURS

    def run_backward(self, with_bias: bool, call: Call, *given: Any) -> tuple:
        with interpret(self.interpret):
            backend = registry.get(self.implementation)
            found = backend.backward(call, self._config(call), *given, with_bias=with_bias)
        *grads, d_bias = self._several(
            found, *(f"the gradient of {name}" for name in ("query", "key", "value", "bias"))
        )
        for name, grad in zip(("query", "key", "value"), grads, strict=True):
            like = getattr(call, name)
            self._expect(f"the gradient of {name}", grad, like.shape, dtype=like.dtype)
        if with_bias:
            grads.append(_bias_gradient(call, *given) if d_bias is None else d_bias)
        return vary(tuple(grads), varying_axes(call))


def _bias_gradient(call: Call, *given: Array) -> Array:
    """The bias's gradient by the XLA backend, whose other gradients the compiler drops: a bias is rarely trained."""
    xla = registry.get("xla")
    *_, d_bias = xla.backward(call, xla.default_config(call), *given, with_bias=True)
    assert d_bias is not None
    return d_bias
