"""The raw Triton kernels of a call compiled to machine code with no GPU: what the assembler says of each."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from xsake import kernels_raw_triton as raw
from xsake._op.arguments import build_call
from xsake.backend.contract import Call
from xsake.kernels_raw_triton import launch
from xsake.kernels_raw_triton.config import SHARED_MEMORY

# Calls of selected_attention: query heads, K/V heads, head dimensions, dtype, and arguments of the mask and the call.
CALLS: dict[str, dict[str, Any]] = {
    "group 16, D 128": {"q_heads": 64, "kv_heads": 4},
    "group 4, D 128": {"q_heads": 16, "kv_heads": 4},
    "group 1, D 64": {"q_heads": 4, "kv_heads": 4, "dim": 64},
    "group 16, D 192 and 128": {"q_heads": 32, "kv_heads": 2, "dim": 192, "value_dim": 128},
    "group 3, D 80, a window, sequences, sinks": {
        "q_heads": 6, "kv_heads": 2, "dim": 80, "window": 100, "sequences": True, "sinks": True,
    },
    "group 8, D 256": {"q_heads": 8, "kv_heads": 1, "dim": 256},
    "group 4, float32, D 64": {"q_heads": 8, "kv_heads": 2, "dim": 64, "dtype": "float32"},
    "a list per query head, D 128": {"q_heads": 8, "kv_heads": 2, "lists": 8},
}  # fmt: skip
MOST_SPILLED = 16  # bytes per thread
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint32": "u32"}


@dataclasses.dataclass(frozen=True)
class Assembled:
    registers: int
    spilled: int  # bytes stored
    shared: int  # bytes


def make_call(
    *,
    q_heads: int,
    kv_heads: int,
    dim: int = 128,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    lists: int | None = None,
    window: int | None = None,
    sequences: bool = False,
    sinks: bool = False,
    tokens: int = 1024,
) -> Call:
    from xsake._selection.selected import mask_of

    query, key, value = (
        jnp.zeros((1, tokens, heads, d), dtype)
        for heads, d in ((q_heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim))
    )
    lists = lists or kv_heads
    most = np.arange(tokens)[None, :, None, None] // 64 + 1
    chosen = np.random.default_rng(0).integers(-1, most, (1, tokens, lists, 4))
    mask = mask_of(chosen, None, tokens, 64, window, q_heads // max(kv_heads, lists))
    return build_call(
        query,
        key,
        value,
        mask,
        default_blocks=(64, 64),
        segment_ids=np.zeros((1, tokens), np.int32) if sequences else None,
        sinks=np.zeros(q_heads, np.float32) if sinks else None,
    )


def backward_arrays(call: Call) -> tuple[Any, Any, Any]:
    """Shapes of lse, delta and d_out."""
    lse = jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), jnp.float32)
    d_out = jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype)
    return lse, lse, d_out


def assembled(call: Call, config: raw.Config, chip: int) -> dict[str, Assembled]:
    """By kernel, what ptxas says for a chip such as 80."""
    return {name: _assemble(compiled) for name, compiled in compiled_kernels(call, config, chip).items()}


def compiled_kernels(call: Call, config: raw.Config, chip: int) -> dict[str, Any]:
    """By kernel, forward and gradients, what Triton compiled; `.asm["ptx"]` is its code."""
    asked: list[dict[str, Any]] = []

    def record(*arrays: Any, **given: Any) -> list[Any]:
        asked.append({"arrays": arrays, **given})
        return [jnp.zeros(x.shape, x.dtype) for x in given["out_shape"]]

    with mock.patch.object(launch, "_triton_call", lambda: record):
        jax.eval_shape(lambda call: raw.forward(call, config), call)
        jax.eval_shape(lambda call, *x: raw.backward(call, config, *x, with_bias=False), call, *backward_arrays(call))
    return {given["kernel"].__name__: _compile(given, chip) for given in asked}


def _compile(given: dict[str, Any], chip: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = given["kernel"]
    dtypes = [x.dtype.name for x in (*given["arrays"], *given["out_shape"])]
    signature = {name: f"*{_TYPES[t]}" for name, t in zip(kernel.arg_names, dtypes, strict=False)} | {"F": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))}
    options = {"num_warps": given["num_warps"], "num_stages": given["num_stages"]}
    source = ASTSource(kernel, signature, {"F": given["F"]}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def _assemble(compiled: Any) -> Assembled:
    said = _ptxas(compiled.asm["ptx"])
    return Assembled(
        registers=_number(r"Used (\d+) registers", said),
        spilled=_number(r"(\d+) bytes spill stores", said),
        shared=compiled.metadata.shared,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"the assembler said nothing of {pattern!r}: {text}"
    return int(found[1])


def _ptxas(ptx: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    arch = re.findall(r"\.target (sm_\w+)", ptx)[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.ptx").write_text(ptx)
        command = [str(tool), "-v", f"-arch={arch}", "k.ptx", "-o", "k.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr


def table(name: str) -> str:
    """A line per chip and kernel. SystemExit for a kernel that spills more than a few bytes or does not fit."""
    call, lines = make_call(**CALLS[name]), []
    config = raw.default_config(call)
    for capability in ("8.0", "8.6", "8.9", "9.0"):
        for kernel, found in assembled(call, config, int(capability.replace(".", ""))).items():
            lines.append(f"{name:42} {capability} {kernel:18} {found}")
            fits = found.shared <= SHARED_MEMORY[capability] and found.spilled <= MOST_SPILLED
            if not fits:
                raise SystemExit(lines[-1])
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:] or CALLS:
        print(table(name))
