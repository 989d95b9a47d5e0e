"""Attention over a sequence that is cut over the devices of several processes; this is one of them.

python sharded_process.py EXCHANGE ADDRESS PROCESSES PROCESS
"""

from __future__ import annotations

import sys


def main() -> None:
    """Process 0 prints how far outputs and gradients are from those of one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils

    import xsake
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
    if jax.process_index() == 0:
        alone = jax.jit(lambda *given: with_grads(oracle.attention, *given))(inputs, cotangent)
        print(max(float(jnp.abs(a - b).max()) for a, b in zip(alone, found, strict=True)))


if __name__ == "__main__":
    main()
