"""The calls that run under NVIDIA's compute-sanitizer, one of each kind of kernel; a name with "mosaic" is a kernel of
ours for Hopper, whose races are looked for, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import xsake
from xsake.kernels_pallas_gpu.hopper.backend import Config
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig

# Sequences are long enough for more tiles than there are SMs, so that the persistent kernel runs.
LENGTH, CACHE, HEADS = 2048, 8192, 16


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def masked(
    block: int,
    head_dim: int,
    *,
    implementation: str,
    dtype: str = "bfloat16",
    keys: int | None = None,
    with_options: bool = False,
    **more: Any,
) -> None:
    """Attention with a mask per head, forward and backward; `keys` of a block, by default as many as queries."""
    keys = keys or block
    q, k, v, d_out = (normal(seed, 1, LENGTH, HEADS, head_dim, dtype=dtype) for seed in range(4))
    drawn = np.random.default_rng(0).random((HEADS, LENGTH // block, LENGTH // keys)) < 0.3
    diagonal = np.arange(LENGTH // keys) == np.arange(LENGTH // block)[:, None] * block // keys
    mask = xsake.BlockMask.from_blocks(
        drawn | diagonal, block_q=block, block_kv=keys, q_len=LENGTH, kv_len=LENGTH, is_causal=True
    )
    if with_options:
        more |= {"segment_ids": jnp.arange(LENGTH)[None] // 700, "sinks": jnp.linspace(-1.0, 1.0, HEADS)}
    both(lambda *x: xsake.attention(*x, mask, implementation=implementation, **more), (q, k, v), d_out)


def one_backward_kernel(head_dim: int, tile: int) -> None:
    """dQ, dK and dV by one kernel, in a fixed order and in any; two columns of each head are cut in two parts."""
    fused = FusedConfig(tile=tile, early=2, parts=2)
    config = Config(forward=ForwardConfig(), dq=BackwardConfig(), dkv=BackwardConfig(), fused=fused)
    for deterministic in (True, False):
        masked(128, head_dim, implementation="mosaic_gpu", config=config, deterministic=deterministic)


def chosen_blocks() -> None:
    """Every token its own blocks; sixteen heads share a tile. The backward gathers the queries of each block."""
    length = LENGTH // 2  # tiles of four tokens: enough of them, and racecheck takes its time
    q, d_out = (normal(seed, 1, length, 2 * HEADS, 128) for seed in (0, 3))
    k, v = (normal(seed, 1, length, 2, 128) for seed in (1, 2))
    own = jnp.arange(length)[None, :, None, None] // 64
    others = (jax.random.uniform(jax.random.key(4), (1, length, 2, 7)) * (own + 1)).astype(jnp.int32)
    indices = jnp.concatenate([jnp.broadcast_to(own, (1, length, 2, 1)), others], -1)
    both(lambda *x: xsake.selected_attention(*x, indices, implementation="mosaic_gpu"), (q, k, v), d_out)


def chunk() -> None:
    """The second half of a prompt. One head's last rows see everything: the forward takes them first, in parts."""
    q, k, v = (normal(seed, 1, n, HEADS, 128) for seed, n in enumerate((LENGTH, 2 * LENGTH, 2 * LENGTH)))
    blocks = np.random.default_rng(0).random((HEADS, LENGTH // 64, 2 * LENGTH // 64)) < 0.05
    blocks[1, -8:] = True
    sizes = dict(block_q=64, block_kv=64, q_len=LENGTH, kv_len=2 * LENGTH, local_window_size=(None, LENGTH))
    finite(xsake.attention(q, k, v, xsake.BlockMask.from_blocks(blocks, **sizes), implementation="mosaic_gpu"))


def few_queries() -> None:
    """One new token against a long cache, in parts, dense and from pages."""
    q, k, v = normal(0, 2, 1, HEADS, 128), normal(1, 2, CACHE, 4, 128), normal(2, 2, CACHE, 4, 128)
    options: dict[str, Any] = {
        "key_value_seq_lengths": jnp.array([CACHE, 5 * CACHE // 8]),
        "implementation": "mosaic_gpu",
    }
    finite(xsake.attention(q, k, v, **options))
    table = jax.random.permutation(jax.random.key(3), 2 * CACHE // 64).reshape(2, -1).astype(jnp.int32)
    pages = (x.reshape(-1, 64, 4, 128) for x in (k, v))
    finite(xsake.attention(q, *pages, page_table=table, **options))


def hads() -> None:
    """A prompt in chunks, and new tokens, all with HADS."""
    from benchmarks.harness.models import make, profile_of
    from xsake.model import PRESETS, HadsBudget, generate

    model = make(PRESETS["tiny"])
    prompts = [list(range(1, 400)), list(range(1, 300))]
    budget = HadsBudget(profile_of(model, 512), prompt=0.5, decode=0.5)
    assert [len(new) for new in generate(model, prompts, max_new_tokens=8, hads=budget, chunk=128)] == [8, 8]


def both(function: Callable[..., Array], inputs: tuple[Array, ...], d_out: Array) -> None:
    out, pull = jax.vjp(function, *inputs)
    finite(out)
    for gradient in pull(d_out):
        finite(gradient)


def finite(x: Array) -> None:
    assert bool(jnp.isfinite(x.astype(jnp.float32)).all())


CALLS: dict[str, Callable[[], None]] = {
    "mosaic_gpu, block 128": partial(masked, 128, 128, implementation="mosaic_gpu"),
    "mosaic_gpu, block 64, a mask a head": partial(masked, 64, 64, implementation="mosaic_gpu"),
    "mosaic_gpu, block 128 x 16": partial(masked, 128, 128, keys=16, implementation="mosaic_gpu"),
    "mosaic_gpu, segments and sinks": partial(masked, 128, 64, implementation="mosaic_gpu", with_options=True),
    "mosaic_gpu, one backward kernel": partial(one_backward_kernel, 128, 64),
    "mosaic_gpu, one backward kernel, D 64": partial(one_backward_kernel, 64, 128),
    "mosaic_gpu, chosen blocks": chosen_blocks,
    "mosaic_gpu, a chunk of a prompt": chunk,
    "mosaic_gpu, few queries": few_queries,
    "triton, float32": partial(masked, 64, 64, implementation="triton", dtype="float32"),
    "triton, bfloat16": partial(masked, 64, 128, implementation="triton"),
    "HADS": hads,
}
