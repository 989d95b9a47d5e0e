"""A case: inputs, cotangents and arguments of one attention call; run an implementation on it, check the results."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from xsake.testing import reference
from xsake.testing.compare import assert_close_to_float64
from xsake.testing.reference import Results
from xsake.testing.target import Target

ARRAYS = ("bias", "sinks", "query_seq_lengths", "key_value_seq_lengths", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_out: np.ndarray
    d_lse: np.ndarray
    blocks: Any  # bool[b, h, nQ, nK]; None is a call without a mask
    block_q: int
    block_kv: int
    mask_causal: bool = False
    mask_window: Any = None
    elements: np.ndarray | None = None  # bool[b, h, T, S]: these elements of the blocks, by bitmaps
    chosen: np.ndarray | None = None  # bool[b, h, T, nK]: the blocks of each token; all blocks are listed
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: bool = True  # whether a run computes them

    @property
    def sizes(self) -> dict[str, int]:
        lengths = dict(q_len=self.query.shape[1], kv_len=self.key.shape[1])
        return dict(block_q=self.block_q, block_kv=self.block_kv) | lengths

    def mask(self, **options):
        if self.blocks is None:
            return None
        if self.chosen is not None:
            return self._mask_of_tokens(**options)
        if self.elements is not None:
            return self._mask_of_elements(**options)
        rule = dict(is_causal=self.mask_causal, local_window_size=self.mask_window)
        return xsake.BlockMask.from_blocks(self.blocks, **self.sizes, **rule, **options)

    def _mask_of_tokens(self, **options):
        numbers = np.where(self.chosen, np.arange(self.chosen.shape[-1]), -1).swapaxes(1, 2)
        sizes = dict(block_q=self.block_q, block_kv=self.block_kv, kv_len=self.key.shape[1])
        return xsake.BlockMask.from_token_indices(numbers, **sizes, is_causal=self.mask_causal, **options)

    def _mask_of_elements(self, **options):
        t, s = self.query.shape[1], self.key.shape[1]
        rows, columns = np.arange(t) // self.block_q, np.arange(s) // self.block_kv
        of_blocks = self.blocks[:, :, rows][:, :, :, columns]
        batch, heads = np.broadcast_shapes(self.elements.shape[:2], of_blocks.shape[:2])
        chosen = np.broadcast_to(self.elements & of_blocks, (batch, heads, t, s))
        past = np.arange(t)[:, None] - np.arange(s)[None]
        chosen = chosen & reference.rule(past, self.mask_causal, None)
        options |= dict(of="tokens", batch=batch, heads=heads, is_causal=self.mask_causal)
        return xsake.patterns.from_function(function=lambda *at: chosen[at], **self.sizes, **options)

    def mask_with_room(self):
        """Its structure does not depend on the blocks: cases of the same shapes share one compiled program."""
        return self.mask(capacity=self.blocks.shape[-2] * self.blocks.shape[-1], density_hint=0.5)

    @property
    def arrays(self) -> dict[str, Any]:
        return {k: jax.tree.map(jnp.asarray, v) for k, v in self.arguments.items() if k in ARRAYS and v is not None}

    @property
    def options(self) -> dict[str, Any]:
        return {k: v for k, v in self.arguments.items() if k not in ARRAYS}

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments that have a gradient."""
        given = {"query": self.query, "key": self.key, "value": self.value}
        given |= {k: self.arguments[k] for k in ("bias", "sinks") if self.arguments.get(k) is not None}
        return {k: jnp.asarray(v) for k, v in given.items()}

    @property
    def rest(self) -> dict[str, Any]:
        """Array arguments that have no gradient."""
        return {k: v for k, v in self.arrays.items() if k not in ("bias", "sinks")}

    @property
    def cotangents(self) -> tuple | None:
        return (jnp.asarray(self.d_out), jnp.asarray(self.d_lse)) if self.gradients else None

    def replace(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


def make(
    target: Target,
    *,
    seed: int = 0,
    dtype: str | None = None,
    batch: int = 2,
    q_len: int = 107,
    kv_len: int | None = None,
    q_heads: int = 4,
    kv_heads: int = 2,
    mask: tuple[int, int] | None = (1, 4),
    density: float = 0.5,
    block_q: int = 16,
    block_kv: int = 32,
    mask_causal: bool = False,
    mask_window: Any = None,
    exact_lengths: bool = False,
    head_dim: int | None = None,
    value_dim: int | None = None,
    bias: tuple[int, int, int, int] | None = None,
    sinks: tuple[int, ...] | None = None,
    spread: float = 1.0,
    **arguments,
) -> Case:
    """Random inputs. `mask` is (batch, heads) of random blocks, or None for no mask; `bias` and `sinks` are shapes, and
    in `bias` 0 stands for the whole dimension. Block sizes and, unless `exact_lengths`, lengths are multiplied by the
    target's `unit`."""
    rng, dtype = np.random.default_rng(seed), dtype or target.dtypes[0]
    kv_len = q_len if kv_len is None else kv_len
    if not exact_lengths:
        q_len, kv_len = target.size(q_len), target.size(kv_len)
    block_q, block_kv = target.size(block_q), target.size(block_kv)
    d, dv = head_dim or target.head_dim, value_dim or target.value_dim

    def normal(*shape: int) -> np.ndarray:
        return (spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    query, key, value = (
        normal(batch, q_len, q_heads, d),
        normal(batch, kv_len, kv_heads, d),
        normal(batch, kv_len, kv_heads, dv),
    )
    d_out = normal(batch, q_len, q_heads, dv)
    d_lse = rng.standard_normal((batch, q_len, q_heads)).astype(np.float32)
    if bias is not None:
        full = (batch, q_heads, q_len, kv_len)
        arguments["bias"] = normal(*(n or whole for n, whole in zip(bias, full, strict=True)))
    if sinks is not None:
        arguments["sinks"] = rng.standard_normal(sinks).astype(np.float32)
    blocks = None
    if mask is not None:
        blocks = rng.random((*mask, -(-q_len // block_q), -(-kv_len // block_kv))) < density
    return Case(
        query=query,
        key=key,
        value=value,
        d_out=d_out,
        d_lse=d_lse,
        blocks=blocks,
        block_q=block_q,
        block_kv=block_kv,
        mask_causal=mask_causal,
        mask_window=mask_window,
        arguments=arguments,
    )


def attend(target: Target, inputs, mask, rest, *, config: Any = None, **options):
    """(output, lse) of the implementation."""
    return xsake.attention(
        **inputs, **rest, mask=mask, **options, return_lse=True, implementation=target.name, config=config
    )


def with_grads(function, inputs, cotangents):
    """`function(inputs)`, and the gradients of all inputs; no gradients where `cotangents` is None."""
    if cotangents is None:
        return function(inputs), {}
    results, vjp = jax.vjp(function, inputs)
    return results, vjp(cotangents)[0]


@cache
def compiled(target: Target, config: Any, options: tuple):
    """One jitted function for all cases of the same static arguments."""

    @jax.jit
    def everything(inputs, mask, rest, cotangents):
        return with_grads(lambda x: attend(target, x, mask, rest, config=config, **dict(options)), inputs, cotangents)

    return everything


def run(target: Target, case: Case, *, mask: Any = "own", config: Any = None) -> Results:
    """Output, lse and, where the case wants them, all gradients by the implementation, under jit."""
    mask = case.mask() if isinstance(mask, str) else mask
    everything = compiled(target, config, tuple(case.options.items()))
    with target.context():
        results, grads = everything(case.inputs, mask, case.rest, case.cotangents)
    return collect(case, results, grads)


def collect(case: Case, results, grads) -> Results:
    """The results as numpy arrays, after a check of the dtypes that the contract promises."""
    out, lse = results
    assert out.dtype == case.query.dtype, f"out has dtype {out.dtype}, and the query {case.query.dtype}"
    assert lse.dtype == np.float32, f"lse has dtype {lse.dtype}, and must have float32"
    for name, grad in grads.items():
        wanted = case.inputs[name].dtype
        assert grad.dtype == wanted, f"d_{name} has dtype {grad.dtype}, and {name} {wanted}"
    return Results(np.asarray(out), np.asarray(lse), **{f"d_{k}": np.asarray(v) for k, v in grads.items()})


def problems(case: Case, actual: Results, *, factor: float = 4.0) -> dict[str, str]:
    """What is wrong with each result, beside float64."""
    truth = reference.evaluate(case, np.float64)
    exact, plain = truth.results, reference.yardstick(truth, reference.evaluate(case, case.query.dtype))
    noise = reference.noise(case, exact)
    found = {}
    for name, value in zip(Results._fields, actual, strict=True):
        if value is not None:
            try:
                assert_close_to_float64(name, value, *(getattr(x, name) for x in (exact, plain, noise)), factor=factor)
            except AssertionError as problem:
                found[name] = str(problem)
    return found


def check(case: Case, actual: Results, *, factor: float = 4.0) -> None:
    """Compare every result with float64."""
    found = problems(case, actual, factor=factor)
    assert not found, "\n".join(found.values())


def check_forward(target: Target, case: Case, *, config: Any = None) -> None:
    """Output and lse alone: interpreted gradients take most of the time."""
    check(case, run(target, case.replace(gradients=False), config=config))


def check_run(target: Target, case: Case, **options) -> Results:
    actual = run(target, case, **options)
    check(case, actual)
    return actual
