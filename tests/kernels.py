"""The kernels that `make kernel` knows: for each a call to compile and a few calls to interpret.

All are small programs on the names that a backend has in any case (`forward`, `backward`, `default_config`), so that a
kernel may be rewritten inside and out, and is still lowered and tried here as before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

# Sizes of a call of xsake.testing.case in units of 4 tokens: one batch entry, and few blocks of 64 or 128.
SMALL: dict[str, Any] = dict(batch=1, q_heads=1, kv_heads=1, mask=(1, 1), q_len=32, block_q=16, block_kv=16)
OF_HOPPER: dict[str, dict[str, Any]] = {
    "causal, blocks of 128": dict(q_len=48, block_q=32, block_kv=32, mask_causal=True, density=1.0),
    "a list per head, odd lengths": dict(q_len=70, kv_len=133, exact_lengths=True, q_heads=2, kv_heads=1, mask=(1, 2)),
    "window, sinks, soft cap": dict(mask_window=(40, 3), density=1.0, sinks=(1,), logits_soft_cap=2.0),
}
SHORT: dict[str, dict[str, Any]] = {  # gathered for dQ, merged for dK and dV
    "short blocks of keys, causal": dict(q_len=48, block_q=32, block_kv=4, mask_causal=True, density=0.4),
}
WIDE: dict[str, dict[str, Any]] = {  # the fused backward takes blocks of 128 keys
    name: arguments | dict(block_kv=32) for name, arguments in OF_HOPPER.items()
}
PACKED = dict(q_len=24, kv_len=100, exact_lengths=True, block_kv=64, density=1.0, kv_heads=1)
OF_TOKENS: dict[str, dict[str, Any]] = {  # queries choose blocks of keys: heads fill up the tiles of queries
    "8 queries of 8 heads": PACKED | dict(block_q=8, q_heads=8, chosen=0.5),
    "8 queries of 16 heads, causal": PACKED | dict(block_q=8, q_heads=16, mask_causal=True, chosen=0.5),
    "16 queries of 4 heads, sinks": PACKED | dict(block_q=16, q_heads=4, sinks=(4,), chosen=0.3),
}
PLAIN: dict[str, dict[str, Any]] = {
    "causal, a list per head": dict(q_len=75, mask_causal=True, q_heads=4, kv_heads=2, mask=(1, 4)),
    "odd lengths, empty rows, bias": dict(q_len=75, kv_len=107, exact_lengths=True, density=0.3, bias=(1, 0, 0, 0)),
    "one query, sinks": dict(q_len=1, kv_len=107, exact_lengths=True, density=0.8, sinks=(1,)),
}
GROUPS = dict(q_len=44, q_heads=4, kv_heads=2, mask=(1, 2), density=1.0)
OF_GROUPS: dict[str, dict[str, Any]] = {
    "causal, a list per K/V head": GROUPS | dict(mask_causal=True, density=0.5),
    "tokens choose": GROUPS | dict(chosen=0.5),
    "tokens choose, window, sinks": GROUPS | dict(chosen=0.5, local_window_size=(19, 0), sinks=(4,)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """`programs()` are the functions to compile, each with its arguments; the kernels in them whose names contain `of`
    are compared. `run(arguments)` interprets one of `calls`, and raises AssertionError where a result is wrong.
    """

    says: str
    room: str
    of: str = ""
    programs: Callable[[], Iterator[tuple[Callable, tuple]]]
    calls: dict[str, dict[str, Any]]
    run: Callable[[dict[str, Any]], None]
    platform: str = "cuda"
    needs: str | None = None  # a package, without which nothing can be tried


# -- calls to compile ------------------------------------------------------------------------------------------------


def _hopper(name: str, *, length: int, direction: str) -> Iterator[tuple[Callable, tuple]]:
    from tests.test_mosaic_lowering import SHAPES, _given, make_call
    from xsake.kernels_pallas_gpu.hopper import backend

    call = make_call(**(SHAPES[name] | dict(q_len=length, kv_len=length)))
    config = backend.default_config(call)
    if direction == "forward":
        yield functools.partial(backend.forward, config=config), (call,)
        return
    config = config.running("dq") if direction == "apart" else config
    yield functools.partial(_backward, backend, config), (call, *_given(call))


def _backward(backend: Any, config: Any, call: Any, lse: Any, d_out: Any) -> Any:
    return backend.backward(call, config, lse, lse, d_out, with_bias=False)


def _first() -> Iterator[tuple[Callable, tuple]]:
    import jax

    import xsake
    from xsake.kernels_pallas_gpu.hopper import first

    mask = xsake.BlockMask.full(8192, 8192, block_q=64, block_kv=64, is_causal=True)
    q, k = (jax.ShapeDtypeStruct((1, 8192, heads, 128), "bfloat16") for heads in (4, 2))
    yield functools.partial(first.forward, scale=0.1), (q, k, k, mask)


def _triton() -> Iterator[tuple[Callable, tuple]]:
    from tests.test_mosaic_lowering import _given, make_call
    from xsake.kernels_pallas_gpu.triton import backend

    call = make_call(q_len=2048, kv_len=2048)
    config = backend.default_config(call)
    yield functools.partial(backend.forward, config=config), (call,)
    yield functools.partial(_backward, backend, config), (call, *_given(call))


def _raw_triton() -> Iterator[tuple[Callable, tuple]]:
    from raw_triton_offline import CALLS, make_call

    from xsake import kernels_raw_triton as backend

    call = make_call(**CALLS["group 4, D 128"])
    yield backend.forward, (call, backend.default_config(call))


def _tpu() -> Iterator[tuple[Callable, tuple]]:
    import jax

    from xsake import kernels_pallas_tpu as backend
    from xsake.kernels_pallas_tpu import ahead

    workload = next(w for w in ahead.WORKLOADS if w.name == "block 128")
    call = workload.call()
    config = backend.default_config(call)
    lse = jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), "float32")
    d_out = jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype)
    yield functools.partial(backend.forward, config=config), (call,)
    yield functools.partial(_backward, backend, config), (call, lse, d_out)


# -- calls to interpret ----------------------------------------------------------------------------------------------


def _case(target: Any, arguments: dict[str, Any]) -> Any:
    import numpy as np

    from xsake.testing.case import make

    arguments = dict(arguments)
    density = arguments.pop("chosen", None)
    case = make(target, **(SMALL | arguments))
    if density is None:
        return case
    shape = (*case.blocks.shape[:2], case.query.shape[1], case.blocks.shape[-1])
    return case.replace(chosen=np.random.default_rng(0).random(shape) < density)


def _run_forward(name: str, arguments: dict[str, Any], **of_target: Any) -> None:
    """The forward alone, on the interpreted backend `name`."""
    import jax
    import numpy as np

    from xsake.testing.case import attend, check
    from xsake.testing.reference import Results

    target = _target(name, **of_target)
    case = _case(target, arguments)

    def run(inputs: Any, mask: Any) -> Any:
        return attend(target, inputs, mask, {}, **case.options)

    with target.context():
        out, lse = jax.jit(run)(case.inputs, case.mask())
    check(case, Results(np.asarray(out), np.asarray(lse)))


def _run_gradients(name: str, arguments: dict[str, Any], **of_target: Any) -> None:
    """Forward and gradients on the interpreted backend `name`."""
    from xsake.testing.case import check_run

    target = _target(name, **of_target)
    fused = of_target.get("head_dim") == 128
    case, config = _case(target, arguments), None
    if fused:
        from xsake.kernels_pallas_gpu.hopper.backend import BackwardConfig, Config, ForwardConfig
        from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig

        parts = dict(forward=ForwardConfig(tile_kv=64, q_stages=1), dq=BackwardConfig(), dkv=BackwardConfig())
        config = Config(**parts, fused=FusedConfig())
    check_run(target, case, config=config)


def _run_tpu(arguments: dict[str, Any]) -> None:
    from jax.experimental.pallas import tpu as pltpu

    from xsake.kernels_pallas_tpu import launch

    with mock.patch.object(launch, "interpreter", pltpu.InterpretParams(detect_races=True)):
        _run_gradients("mosaic_tpu", arguments)


def _target(name: str, **changed: Any) -> Any:
    from targets import TARGETS

    found = next(target for target in TARGETS if target.name == name)
    return dataclasses.replace(found, interpret=True, marks=(), **changed)


def _run_first(arguments: dict[str, Any]) -> None:
    import jax
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from xsake.kernels_pallas_gpu.hopper import first
    from xsake.testing.case import check
    from xsake.testing.reference import Results

    case = _case(_target("mosaic_gpu", value_dim=64), arguments)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = functools.partial(first.forward, scale=case.query.shape[-1] ** -0.5, interpret=interpret)
    out, lse = jax.jit(run)(case.query, case.key, case.value, case.mask())
    check(case, Results(np.asarray(out), np.asarray(lse).swapaxes(1, 2)))


_hopper_forward = functools.partial(_run_forward, "mosaic_gpu", value_dim=64)
_hopper_gradients = functools.partial(_run_gradients, "mosaic_gpu", value_dim=64)
_FIRST: dict[str, dict[str, Any]] = {
    "a list per head, odd lengths": OF_HOPPER["a list per head, odd lengths"],
    "causal": dict(mask_causal=True, density=1.0),
    "empty rows": dict(density=0.0),
    "more blocks than slots": dict(kv_len=80, density=1.0),
}
# A slot that is freed too early shows only where it is used again: lists must be longer than the rings.
_LONG_KEYS = {"more blocks of keys than slots": dict(q_len=16, kv_len=160, density=1.0)}
_LONG_QUERIES = {"more blocks of queries than slots": dict(q_len=160, kv_len=32, block_kv=32, density=1.0)}
_D128 = "D 128, block 128"

KERNELS: dict[str, Entry] = {
    "first": Entry(
        says="the Hopper forward to learn from",
        room="kernels_pallas_gpu/hopper/first.py",
        of="first",
        programs=_first,
        calls=_FIRST,
        run=_run_first,
    ),
    "forward": Entry(
        says="out and lse on Hopper",
        room="kernels_pallas_gpu/hopper/forward",
        programs=functools.partial(_hopper, _D128, length=8192, direction="forward"),
        calls=OF_HOPPER | _LONG_KEYS,
        run=_hopper_forward,
    ),
    "dq": Entry(
        says="gradient of the queries on Hopper",
        room="kernels_pallas_gpu/hopper/dq",
        of="dq",
        programs=functools.partial(_hopper, _D128, length=2048, direction="apart"),
        calls=OF_HOPPER | _LONG_KEYS | SHORT,
        run=_hopper_gradients,
    ),
    "dkv": Entry(
        says="gradients of keys and values on Hopper",
        room="kernels_pallas_gpu/hopper/dkv",
        of="dkv",
        programs=functools.partial(_hopper, _D128, length=2048, direction="apart"),
        calls=OF_HOPPER | _LONG_QUERIES | SHORT,
        run=_hopper_gradients,
    ),
    "fused": Entry(
        says="all gradients in one kernel on Hopper, for long calls",
        room="kernels_pallas_gpu/hopper/fused",
        of="backward",
        programs=functools.partial(_hopper, _D128, length=8192, direction="fused"),
        calls=WIDE | _LONG_QUERIES,
        run=functools.partial(_run_gradients, "mosaic_gpu", head_dim=128, value_dim=64),
    ),
    "gathered": Entry(
        says="gradients on Hopper where tokens choose their blocks",
        room="kernels_pallas_gpu/hopper/gathered",
        of="gathered",
        programs=functools.partial(_hopper, "8 queries of 16 heads, a bit per token", length=512, direction="default"),
        calls=OF_TOKENS,
        run=functools.partial(_run_gradients, "mosaic_gpu", unit=1, value_dim=64),
    ),
    "triton": Entry(
        says="forward and gradients in Pallas-Triton",
        room="kernels_pallas_gpu/triton",
        of="xsake_triton",
        programs=_triton,
        calls=PLAIN,
        run=functools.partial(_run_gradients, "triton"),
    ),
    "raw_triton": Entry(
        says="forward and gradients in Triton itself",
        room="src/xsake/kernels_raw_triton",
        programs=_raw_triton,
        calls=OF_GROUPS,
        run=functools.partial(_run_gradients, "raw_triton"),
        needs="jax_triton",
    ),
    "tpu": Entry(
        says="forward and gradients on TPUs",
        room="kernels_pallas_tpu",
        of="xsake",
        programs=_tpu,
        calls=PLAIN,
        run=_run_tpu,
        platform="tpu",
    ),
}
