"""ejkernel's block-sparse attention beside xsake's, of the same name and signature: needs pip install ejkernel.

python examples/ejkernel_attention.py
"""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.blocksparse_attention import blocksparse_attention as theirs

from xsake.compat.ejkernel import blocksparse_attention as ours


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, heads, 256, 32)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    segments = jnp.sort(jax.random.randint(jax.random.key(1), (2, 256), 0, 3), -1)
    calls = {
        "causal": {},
        "a window": dict(sliding_window=(64, 0)),
        "a soft cap and segments": dict(logits_soft_cap=5.0, q_segment_ids=segments, kv_segment_ids=segments),
    }
    for name, call in calls.items():
        found, wanted = ours(q, k, v, **call), theirs(q, k, v, **call)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        worst = abs(np.asarray(found) - np.asarray(wanted)).max()
        print(f"ejkernel {version('ejkernel')}, jax {version('jax')}, {name}: {worst:.1e}")


if __name__ == "__main__":
    main()
