"""Attention over a sequence that is cut over the devices of several processes; this is one of them.

python sharded_process.py EXCHANGE ADDRESS PROCESSES PROCESS
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import xsake


def main() -> None:
    """Process 0 prints how far outputs and gradients are from those of one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    from xsake.kernels_xla_ref import oracle
    from xsake.model.training.distributed import initialize

    exchange, address, *numbers = sys.argv[1:]
    initialize(address, *map(int, numbers))
    mesh = jax.make_mesh((jax.device_count(),), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    *inputs, cotangent = (rng.standard_normal((1, 256, heads, 16)).astype(np.float32) for heads in (2, 1, 1, 2))
    blocks = rng.random((2, 16, 16)) < 0.5
    blocks |= np.eye(16, dtype=bool)[None]
    mask = xsake.BlockMask.from_blocks(blocks, block_q=16, block_kv=16, q_len=256, kv_len=256, is_causal=True)

    def with_grads(attend, inputs, cotangent):
        out, backward = jax.vjp(lambda *qkv: attend(*qkv, mask), *inputs)
        return out, *backward(cotangent)

    cut = jax.NamedSharding(mesh, jax.P(None, "seq"))

    def place(x):
        return jax.make_array_from_callback(x.shape, cut, lambda index: x[index])

    def attend(*qkv):
        return xsake.sharded_attention(*qkv, mesh=mesh, sequence="seq", exchange=exchange)

    placed = [place(x) for x in inputs], place(cotangent)
    found = multihost_utils.process_allgather(jax.jit(lambda *given: with_grads(attend, *given))(*placed), tiled=True)
    states = multihost_utils.process_allgather(read_by_hads(exchange, jax.devices()), tiled=True)
    if jax.process_index() == 0:
        alone = jax.jit(lambda *given: with_grads(oracle.attention, *given))(inputs, cotangent)
        wrong = [float(jnp.abs(a - b).max()) for a, b in zip(alone, found, strict=True)]
        print(max(*wrong, float(np.abs(states - read_by_hads(exchange, jax.local_devices()[:1])).max())))


def read_by_hads(exchange: str, devices: list) -> Any:
    """The final states of a prompt that HADS reads, cut over these devices: by masks for as many shards as processes
    have devices."""
    import jax
    import numpy as np
    from flax import nnx
    from hads_case import random_profile
    from tiny_model import TINY, build

    from xsake.hads import HadsMask

    config = dataclasses.replace(TINY, layers=1, context=256)
    heads = dict(layers=1, q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    mask_fn = HadsMask.of(random_profile(**heads), 0.5, 256, transpose=False, shards=jax.device_count(), order="zigzag")
    graph, weights = nnx.split(build(config=config))
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(1, 256), dtype=np.int32)
    axes = ("data", "model", "sequence")
    mesh = jax.make_mesh((1, 1, len(devices)), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=devices)
    cut = dict(mesh=mesh, order="zigzag", exchange=exchange) if len(devices) > 1 else {}
    given = xsake.zigzag(tokens, len(devices)) if cut else tokens
    place = jax.NamedSharding(mesh, jax.P())
    out = jax.jit(lambda weights, mask_fn: nnx.merge(graph, weights).hidden(given, mask_fn=mask_fn, **cut))(
        *jax.device_put((jax.device_get(weights), jax.device_get(mask_fn)), place)
    )
    return out if cut else xsake.zigzag(np.asarray(out), jax.device_count())


if __name__ == "__main__":
    main()
