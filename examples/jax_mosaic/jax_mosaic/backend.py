"""JAX's own attention for Hopper GPUs, `jax.experimental.pallas.ops.gpu.attention_mgpu`, as a backend.

That kernel is dense, in float16 alone, with whole tiles of tokens and of 64 channels, without a scale, and without
gradients of causal calls. Here tokens and channels are added where tiles lack them, and the scale goes into the query.
What is missing then is refused by name.

A query times a scale that is no power of two is rounded: the output is as right as float16 is, but lse moves by up to
1e-3, which XSAKE's checks find. Such calls are refused too, unless the environment has JAX_MOSAIC_ROUNDS=1.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention_mgpu

from xsake.backend import Band, BlockMask, Call, DeltaParts, check_fields, one_of, whole

CONTRACT = 1
HONOURS = frozenset({"band", "delta_parts"})
CAUSAL = Band(right=0)
TOKENS = 128  # tokens are added up to a multiple of this
MOST_CHANNELS = 128
SHARED_MEMORY = 227 * 1024
NEVER = -60000.0  # a logit that weighs nothing, and that float16 holds
LN2 = math.log(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """Keys in a tile, and how many tiles are in shared memory."""

    block_kv: int = one_of(64, 128, 256)
    stages: int = whole(2, 8)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward:
    """The tiles of its two kernels, and how many warpgroups of a CTA compute."""

    block_q_dq: int = one_of(64, 128)
    block_kv_dq: int = one_of(64, 128)
    block_q_dkv: int = one_of(64, 128)
    block_kv_dkv: int = one_of(64, 128)
    warpgroups: int = whole(1, 2)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    forward: Forward
    backward: Backward

    def __post_init__(self) -> None:
        check_fields(self)


# -- what it serves ----------------------------------------------------------------------------------------------------


def unavailable() -> str | None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"JAX's kernel needs a Hopper GPU and cannot be interpreted, and this process runs on {device.platform}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    return None if capability == "9.0" else f"JAX's kernel is for compute capability 9.0, and this GPU has {capability}"


def unsupported(call: Call) -> str | None:
    if call.query.dtype != jnp.float16:
        return f"query has dtype {call.query.dtype}, and JAX's kernel computes in float16"
    if math.frexp(call.scale)[0] not in (0.5, -0.5) and os.environ.get("JAX_MOSAIC_ROUNDS") != "1":
        return f"scale={call.scale:.4g} is no power of two, and JAX's kernel gets the query times the scale in float16"
    if call.band not in (Band(), CAUSAL):
        return "local_window_size is given, and JAX's kernel has no windows"
    if leaves_out_blocks(call.mask):
        return f"mask may leave out blocks (density_hint={call.mask.density_hint}), and JAX's kernel is dense"
    if channels(call) > MOST_CHANNELS:
        spare = (
            ", and one more is needed to leave out the keys that fill the last tile" if added_keys_weigh(call) else ""
        )
        return f"heads have {max(call.head_dim, call.value_dim)} channels{spare}; {MOST_CHANNELS} at most are supported"
    return None


def leaves_out_blocks(mask: BlockMask) -> bool:
    """Whether the mask is known to be sparse, or may be. `forward` looks at a traced mask of about all blocks."""
    if not mask.traced:
        return float(mask.density()) < 1
    return mask.most_density < 1 or mask.density_hint is None or mask.density_hint < 1


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128


# -- configurations ----------------------------------------------------------------------------------------------------


def default_config(call: Call) -> Config:
    return Config(forward=Forward(block_kv=128, stages=2), backward=_backward(64, 64, 64, 64, 1))


def search_space(call: Call) -> Sequence[Config]:
    """Each direction by itself, the default first."""
    default = default_config(call)
    forwards = [Forward(block_kv=kv, stages=stages) for kv in (128, 64, 256) for stages in (2, 3, 4)]
    tiles = [(64, 64, 64, 64), (64, 128, 128, 64), (128, 64, 64, 128)]
    backwards = [_backward(*four, warpgroups) for warpgroups in (1, 2) for four in tiles] if not _causal(call) else []
    space = [dataclasses.replace(default, forward=forward) for forward in forwards]
    space += [dataclasses.replace(default, backward=backward) for backward in backwards]
    return [config for config in space if misfit(call, config) is None]


def misfit(call: Call, config: Config) -> str | None:
    forward, backward = config.forward, config.backward
    queries, keys = tokens(call)
    if keys % forward.block_kv:
        return f"{forward.block_kv=} does not divide {keys} keys"
    for name, length, block in (("queries", queries, backward.block_q_dq), ("keys", keys, backward.block_kv_dkv)):
        if length % (block * backward.warpgroups):
            return f"{backward.warpgroups} tiles of {block} do not divide {length} {name}"
    used = max(
        _tiles(call, 2 * 64, 2 * forward.stages * forward.block_kv),
        _tiles(call, 2 * backward.warpgroups * backward.block_q_dq, 4 * backward.block_kv_dq),
        _tiles(call, 2 * backward.warpgroups * backward.block_kv_dkv, 4 * backward.block_q_dkv),
    )
    return None if used <= SHARED_MEMORY else f"its tiles take {used} bytes of shared memory, of {SHARED_MEMORY}"


def _tiles(call: Call, *rows: int) -> int:
    """Bytes of so many rows of float16, and 4 KiB for sums and barriers."""
    return 2 * channels(call) * sum(rows) + 4096


def _backward(*blocks: int) -> Backward:
    return Backward(**dict(zip((f.name for f in dataclasses.fields(Backward)), blocks, strict=True)))


def _tuning(call: Call, config: Config) -> attention_mgpu.TuningConfig:
    backward = dataclasses.asdict(config.backward)
    return attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=config.forward.block_kv,
        max_concurrent_steps=config.forward.stages,
        causal=_causal(call),
        compute_wgs_bwd=backward.pop("warpgroups"),
        **backward,
    )


# -- the call ----------------------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> tuple[Array, Array]:
    out, (lse,) = attention_mgpu.attention(*_given(call), _tuning(call, config), True)
    out, lse = out[:, : call.q_len, :, : call.value_dim], lse[:, :, : call.q_len] * LN2
    if not call.mask.traced:
        return out, lse
    dense = (call.mask.density(per_head=True) == 1).all()  # otherwise NaN, as where a mask overflowed
    return jnp.where(dense, out, jnp.nan), jnp.where(dense, lse, jnp.nan)


def backward(
    call: Call, config: Config, lse: Array, delta: Array | DeltaParts, d_out: Array, *, with_bias: bool
) -> tuple[Array, Array, Array, None]:
    if _causal(call):
        raise NotImplementedError("jax_mosaic has no gradients of causal calls, since JAX's kernel has none")
    query, key, value = _given(call)
    if isinstance(delta, DeltaParts) and delta.d_lse is None:
        out = delta.out
    else:
        out, d_out = _with_delta(delta.summed(lse, d_out) if isinstance(delta, DeltaParts) else delta, d_out)
    out, d_out = _filled(out, query.shape), _filled(d_out.astype(jnp.float16), query.shape)
    # Added rows weigh nothing.
    lse = jnp.pad(lse / LN2, ((0, 0), (0, 0), (0, query.shape[1] - call.q_len)), constant_values=jnp.inf)
    with jax.default_matmul_precision("highest"):  # of delta
        d_query, d_key, d_value = attention_mgpu._attention_bwd(
            _tuning(call, config), False, (query, key, value, out, lse), d_out
        )
    d_query = (d_query[:, : call.q_len, :, : call.head_dim].astype(jnp.float32) * call.scale).astype(jnp.float16)
    d_key, d_value = d_key[:, : call.kv_len], d_value[:, : call.kv_len]
    return d_query, d_key[..., : call.head_dim], d_value[..., : call.value_dim], None


def _causal(call: Call) -> bool:
    return call.band == CAUSAL


def tokens(call: Call) -> tuple[int, int]:
    """Queries and keys that JAX's kernel gets. Where it is causal, it reads as many keys as queries."""
    queries, keys = (-(-length // TOKENS) * TOKENS for length in (call.q_len, call.kv_len))
    return queries, max(queries, keys) if _causal(call) else keys


def added_keys_weigh(call: Call) -> bool:
    """Whether queries would attend to keys that are there to fill a tile."""
    return tokens(call)[1] > call.kv_len and not (_causal(call) and call.kv_len >= call.q_len)


def channels(call: Call) -> int:
    used = max(call.head_dim, call.value_dim) + added_keys_weigh(call)
    return -(-used // 64) * 64


def _given(call: Call) -> tuple[Array, Array, Array]:
    """Query, key and value for JAX's kernel: the query times the scale, and all filled up with zeros."""
    (queries, keys), width = tokens(call), channels(call)
    query = (call.query.astype(jnp.float32) * call.scale).astype(jnp.float16)
    query = _filled(query, (call.batch, queries, call.q_heads, width))
    key, value = (_filled(x, (call.batch, keys, call.kv_heads, width)) for x in (call.key, call.value))
    if added_keys_weigh(call):  # by a channel that keys of the call do not have
        query = query.at[..., call.head_dim].set(1.0)
        key = key.at[:, call.kv_len :, :, call.head_dim].set(NEVER)
    return query, key, value


def _filled(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.pad(x, [(0, size - have) for have, size in zip(x.shape, shape, strict=True)])


def _with_delta(delta: Array, d_out: Array) -> tuple[Array, Array]:
    """An output whose rows have this product with the output's cotangent: JAX's kernel knows delta as that alone.

    A row whose cotangent is 0 gets the least float16 there, in one channel, so that there is a product.
    """
    least = jnp.where((d_out == 0).all(-1, keepdims=True), jnp.finfo(jnp.float16).smallest_subnormal, 0)
    d_out = d_out.at[..., :1].add(least.astype(d_out.dtype))
    wide = d_out.astype(jnp.float32)
    return wide * (delta.swapaxes(1, 2)[..., None] / (wide * wide).sum(-1, keepdims=True)), d_out
