"""The GPU kernels of a decoding step, counted in a program that is compiled for Hopper with no GPU."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import hads_case
import jax
import jax.numpy as jnp
from cuda_offline import on_chip
from flax import nnx

from xsake._op import tuned
from xsake.hads import PooledKeys
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.model import HadsBudget, KVCache, Transformer
from xsake.model.generation import sparse_decode, writer
from xsake.model.generation.sampling import Sampler
from xsake.model.network.config import ModelConfig

# Qwen2.5-1.5B's layers, with fewer words.
_SIZES = dict(vocab_size=1024, width=1536, q_heads=12, kv_heads=2, head_dim=128, mlp_width=8960, qkv_bias=True)
_CAPACITY, _BLOCK = 32768, 64
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "async-done")


def pretend_hopper() -> None:
    """Let the package believe that this process has a Hopper GPU: which kernels it takes depends on that."""
    assert mosaic and tuned  # imported, so that their names are replaced too
    seen = dict(
        platform_of=lambda array: "gpu",
        compute_capability=lambda: "9.0",
        core_count=lambda: 132,
        device_kind=lambda array: "NVIDIA H200",
    )
    for module in [m for name, m in sys.modules.items() if name.startswith("xsake")]:
        for name in seen.keys() & vars(module).keys():
            setattr(module, name, seen[name])


def kernels_per_layer(batch: int, *, hads: bool) -> int:
    """What one more layer adds. Both programs have several layers: the first one shares less with others."""
    fewer, more = (_kernels(_program(layers, batch, hads=hads)) for layers in (2, 3))
    return more - fewer


def _program(layers: int, batch: int, *, hads: bool) -> str:
    config = ModelConfig(layers=layers, context=_CAPACITY, **_SIZES)
    weights, tree = jax.tree.flatten(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))
    cache = jax.eval_shape(lambda: KVCache.empty(config, batch=batch, capacity=_CAPACITY))
    given: tuple[Any, ...] = jax.ShapeDtypeStruct((batch,), jnp.int32), dataclasses.replace(cache, filled=True)
    key = jax.eval_shape(lambda: jax.random.key(0))
    if not hads:
        return on_chip("sm_90", lambda *x: writer._decode.lower(tree, Sampler(), *x), weights, *given, key).as_text()
    heads = dict(q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    budget = HadsBudget(hads_case.random_profile(layers=layers, block=_BLOCK, **heads), 0.5, decode=0.1)
    step = sparse_decode.StepRule.of(budget, shortest=20000, capacity=_CAPACITY)
    features = (batch, config.kv_heads, _CAPACITY // _BLOCK, 5, config.head_dim)
    pooled = tuple(PooledKeys(jax.ShapeDtypeStruct(features, jnp.float32)) for _ in range(layers))
    given = (weights, *given, pooled, budget.learned, key)
    return on_chip("sm_90", lambda *x: sparse_decode.decode.lower(tree, Sampler(), step, *x), *given).as_text()


def _kernels(program: str) -> int:
    """Instructions of the compiled program that run something on the device."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            is_entry, name = re.match(r"(ENTRY )?%?([\w.\-]+)", line).groups()  # type: ignore[union-attr]
            name = "ENTRY" if is_entry else name
            bodies[name] = []
        elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(", line):
            bodies[name].append((found[1], line))

    def count(body: str) -> int:
        total = 0
        for op, line in bodies[body]:
            if op in ("call", "async-start"):
                total += count(re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", line)[1])  # type: ignore[index]
            else:
                total += op not in _FREE
        return total

    return count("ENTRY")
