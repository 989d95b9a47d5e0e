"""Yardsticks for the results of a call, from the dense oracle in float64.

The plain computation is dense, on the same inputs, in their precision. One group of heads is computed, a few rows at a
time, so that sequences of any length can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake._measure.closeness import Yardstick
from xsake.hads.mask.block_mask import BlockMask
from xsake.kernels_xla_ref import oracle

NAMES = ("out", "lse", "d_query", "d_key", "d_value")
_ELEMENTS = {"gpu": 2**26}  # logits held at once, by platform
_FEW_ELEMENTS = 2**22
# The programs run a few times only: XLA's search for the fastest matrix products would take longer than they do.
_QUICKLY = {"xla_gpu_autotune_level": 0}


def yardsticks(query: Array, key: Array, value: Array, d_out: Array, mask: BlockMask) -> dict[str, Yardstick]:
    """The yardstick of each result, for the last KV head of the last batch entry and the query heads that share it.

    Every row must attend something.
    """
    share = query.shape[2] // key.shape[2]
    lists = np.arange(query.shape[2])[-share:] * mask.heads // query.shape[2]
    blocks = np.asarray(mask.to_blocks())[-1][lists]
    q, do = (np.asarray(x[-1:, :, -share:]) for x in (query, d_out))
    k, v = (np.asarray(x[-1:, :, -1:]) for x in (key, value))

    with jax.enable_x64(True), jax.default_device(_device()):
        exact, plain = (_over_chunks(formula, q, k, v, do, blocks, mask) for formula in (_exact, _plain))
    noise = _noise(q, k, exact)
    types = dict.fromkeys(NAMES, q.dtype) | {"lse": np.float32}
    return {name: Yardstick.of(exact[name], plain[name].astype(types[name]), noise[name]) for name in NAMES}


def _over_chunks(
    formula: Callable,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    blocks: np.ndarray,
    mask: BlockMask,
) -> dict[str, np.ndarray]:
    """Apply `formula` chunk by chunk: join the results of rows, add up the gradients of keys and values."""
    of_rows, of_keys = [], None
    for rows, chunk in _chunks(blocks, mask):
        *row_results, d_key, d_value = formula(
            q[:, rows], k, v, d_out[:, rows], chunk, rows.start, is_causal=mask.is_causal
        )
        of_rows.append(row_results)
        of_keys = (d_key, d_value) if of_keys is None else (of_keys[0] + d_key, of_keys[1] + d_value)
    joined = (jnp.concatenate(column, axis=1) for column in zip(*of_rows, strict=True))
    assert of_keys is not None
    return {name: np.asarray(x) for name, x in zip(NAMES, (*joined, *of_keys), strict=True)}


def _device() -> jax.Device:
    """The device for float64: a CPU in place of a TPU, which has no float64."""
    return jax.local_devices(backend="cpu")[0] if jax.default_backend() == "tpu" else jax.local_devices()[0]


def _chunks(blocks: np.ndarray, mask: BlockMask) -> Iterator[tuple[slice, BlockMask]]:
    """Chunks of rows, each with a mask of its blocks but without a rule: formulas apply causality by row number."""
    limit = _ELEMENTS.get(jax.default_backend(), _FEW_ELEMENTS)
    step = max(1, limit // (len(blocks) * mask.kv_len * mask.block_q))
    for first in range(0, mask.num_q_blocks, step):
        rows = slice(first * mask.block_q, min((first + step) * mask.block_q, mask.q_len))
        some = blocks[:, first : first + step]
        yield (
            rows,
            BlockMask.from_blocks(
                some,
                block_q=mask.block_q,
                block_kv=mask.block_kv,
                q_len=rows.stop - rows.start,
                kv_len=mask.kv_len,
                capacity=some[0].size,
                transpose=False,
                density_hint=1.0,
            ),
        )


@partial(jax.jit, static_argnames="is_causal", compiler_options=_QUICKLY)
def _exact(
    q: Array, k: Array, v: Array, d_out: Array, mask: BlockMask, first: Array, *, is_causal: bool
) -> tuple[Array, ...]:
    q, k, v, d_out = (x.astype(jnp.float64) for x in (q, k, v, d_out))
    positions = (first + jnp.arange(q.shape[1])[None], jnp.arange(k.shape[1])[None])

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return oracle.attention(q, k, v, mask, is_causal=is_causal, positions=positions, return_lse=True)  # type: ignore[return-value]

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return out, lse, *pull((d_out, jnp.zeros_like(lse)))


@partial(jax.jit, static_argnames="is_causal", compiler_options=_QUICKLY)
def _plain(
    q: Array, k: Array, v: Array, d_out: Array, mask: BlockMask, first: Array, *, is_causal: bool
) -> tuple[Array, ...]:
    """The dense formula in float32, weights and results rounded to the type of the inputs."""
    dtype, scale = q.dtype, np.float32(q.shape[-1] ** -0.5)

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(jnp.float32)

    dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    q, k, v, d_out = (x.astype(jnp.float32)[0] for x in (q, k, v, d_out))
    k, v = k[:, 0], v[:, 0]
    blocks = jnp.repeat(jnp.repeat(mask.to_blocks()[0], mask.block_q, 1), mask.block_kv, 2)
    attends = blocks[:, : q.shape[0], : k.shape[0]]
    if is_causal:
        attends &= (first + jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[None])[None]
    logits = jnp.where(attends, dot("thd,sd->hts", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jnp.exp(logits - lse[..., None])
    out = rounded(dot("hts,sd->thd", rounded(p), v))
    delta = (d_out * out).sum(-1).swapaxes(0, 1)
    d_logits = rounded(p * (dot("thd,sd->hts", d_out, v) - delta[..., None]))
    d_query = dot("hts,sd->thd", d_logits, k) * scale
    d_key = dot("hts,thd->sd", d_logits, q) * scale
    d_value = dot("hts,thd->sd", rounded(p), d_out)
    return (out[None], lse.swapaxes(0, 1)[None], d_query[None], *(x[None, :, None] for x in (d_key, d_value)))


def _noise(q: np.ndarray, k: np.ndarray, exact: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """(largest, RMS) error of rounding the exact result once: allowed even if the plain result is exact by luck.

    The lse is float32, and may be small although the products in it are large: its noise is that of the products.
    """
    unit = float(jnp.finfo(q.dtype).eps) / 2
    noise = {name: (unit * float(np.abs(x).max()), unit / 2 * _rms(x)) for name, x in exact.items()}
    products = float(np.abs(q.astype(np.float64)).max() * np.abs(k.astype(np.float64)).max()) * q.shape[-1] ** 0.5
    return noise | {"lse": (2.0**-24 * products, 2.0**-25 * products)}


def _rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(error))))
