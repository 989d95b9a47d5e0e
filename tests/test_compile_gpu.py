"""GPU kernels compiled to machine code with no GPU: no spilled registers, no serialised tensor-core products.

Needs the CUDA plugin of jax's own version, ptxas and libdevice, and nothing else: `make compile-gpu` installs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import paged_case
import pytest
import raw_triton_offline

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
INSTALLED = {d.metadata["Name"] for d in metadata.distributions()}
MISSING = sorted(set(WHEELS) - INSTALLED)
NO_JAX_TRITON = sorted({"jax-triton", "triton"} - INSTALLED)

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(bool(MISSING), reason=f"the CUDA compiler's wheels are not installed: {', '.join(MISSING)}"),
]

# The main paths. Options that are known to spill a few bytes (bias; some at head_dim 256; the forward of 16 queries of
# 8 heads) are left out by name.
MOSAIC = [
    "D 128, block 128",
    "D 64, block 64, a list per head",
    "D 64, block 64, a list per group",
    "block 256 x 128",
    "block 128 x 16",
    "block 64 x 32, a list per group",
    "Dv 64",
    "soft cap and sinks",
    "bitmaps",
    "a bit per token, D 64, block 64",
    "8 queries of 16 heads, a bit per token",
    "16 queries of 4 heads",
]

MOSAIC_SCRIPT = """
import os, sys, tempfile, pathlib
dump = pathlib.Path(tempfile.mkdtemp())
os.environ |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import jax, jax.numpy as jnp
from tests.cuda_offline import compile, complaints
from tests.test_mosaic_lowering import ARGUMENTS, SHAPES, everything, make_call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
# Long enough for more tiles than there are CTAs: what runs is the persistent kernel.
call = make_call(**({"q_len": 8192, "kv_len": 8192} | (SHAPES | ARGUMENTS)[sys.argv[1]]))
lse = jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), jnp.float32)
d_out = jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype)
default = mosaic.default_config(call)
report = []
for config in dict.fromkeys([default, default.running("dq")]):
    report += compile(everything(config), call, lse, d_out, chip="sm_90", dump=dump)
assert any("registers" in line for line in report), "the assembler said nothing"
print("\\n".join(complaints(report)))
os._exit(0 if not complaints(report) else 1)
"""


def run(script: str, *arguments: str) -> None:
    """Runs in a process of its own: a compiler that does not know an instruction aborts the process."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("name", MOSAIC)
def test_mosaic_defaults_compile_for_hopper(name):
    run(MOSAIC_SCRIPT, name)


FIRST_SCRIPT = """
import os, sys, tempfile, pathlib
dump = pathlib.Path(tempfile.mkdtemp())
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1"}
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src")]
import jax
import xsake
from tests.cuda_offline import compile, complaints
from xsake.kernels_pallas_gpu.hopper import first
head_dim, block_kv = map(int, sys.argv[1:])
mask = xsake.BlockMask.full(8192, 8192, block_q=64, block_kv=block_kv, is_causal=True)
q, k = (jax.ShapeDtypeStruct((1, 8192, heads, head_dim), "bfloat16") for heads in (4, 2))
report = compile(lambda *x: first.forward(*x, scale=0.1), q, k, k, mask, chip="sm_90", dump=dump)
assert any("registers" in line for line in report), "the assembler said nothing"
print("\\n".join(complaints(report)))
os._exit(0 if not complaints(report) else 1)
"""


@pytest.mark.parametrize(("head_dim", "block_kv"), [(64, 64), (128, 128)])
def test_the_first_kernel_compiles_for_hopper(head_dim, block_kv):
    run(FIRST_SCRIPT, str(head_dim), str(block_kv))


TWO_CHIPS_SCRIPT = """
import os, sys
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh
import xsake
from tests.cuda_offline import _mesh, chips
from xsake._op import attention
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
mosaic.unavailable, attention.platform_of = (lambda: None), (lambda query: "gpu")
mesh = Mesh(np.array(chips("sm_90", 2)), ("x",))
def on_mesh(x, *spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
q, k = (on_mesh(jax.ShapeDtypeStruct((1, 8192, n, 128), jnp.bfloat16), None, None, "x") for n in (8, 2))
mask = jax.tree.map(on_mesh, xsake.BlockMask.full(8192, 8192, is_causal=True))  # long rows: the fused backward
def gradients(q, k, v, mask):
    out, pull = jax.vjp(lambda *x: xsake.attention(*x, mask, implementation="mosaic_gpu"), q, k, v)
    return pull(out)
with use_abstract_mesh(_mesh("sm_90")):
    text = jax.jit(gradients).trace(q, k, k, mask).lower(lowering_platforms=("cuda",)).compile().as_text()
assert "bf16[1,8192,4,128]" in text and "all-gather" not in text, "each chip has four of the heads"
os._exit(0)
"""


def test_two_chips_each_compute_their_heads():
    """With automatic mesh axes, where the compiler cuts the call: kernels that count in memory have effects."""
    run(TWO_CHIPS_SCRIPT)


TRITON_SCRIPT = """
import os, sys, pathlib, tempfile
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import jax, jax.numpy as jnp
from tests.cuda_offline import compile
from tests.test_mosaic_lowering import make_call
from xsake.kernels_pallas_gpu.triton import backend as triton
chip, head_dim = sys.argv[1], int(sys.argv[2])
call = make_call(head_dim=head_dim, bitmaps=sys.argv[3] or None)
config = triton.default_config(call)
lse = jax.ShapeDtypeStruct((call.batch, call.q_heads, call.q_len), jnp.float32)
d_out = jax.ShapeDtypeStruct((call.batch, call.q_len, call.q_heads, call.value_dim), call.query.dtype)
def everything(call, lse, d_out):
    return triton.forward(call, config), triton.backward(call, config, lse, lse, d_out, with_bias=False)
compile(everything, call, lse, d_out, chip=chip, dump=pathlib.Path(tempfile.mkdtemp()))
os._exit(0)
"""


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("head_dim", "bitmaps"), [(64, ""), (128, ""), (128, "of elements")])
def test_triton_defaults_compile(chip, head_dim, bitmaps):
    run(TRITON_SCRIPT, chip, str(head_dim), bitmaps)


BIAS_SCRIPT = """
import os, sys, pathlib, re, tempfile
dump = pathlib.Path(tempfile.mkdtemp())
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_emitter_re=triton"}
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import jax, jax.numpy as jnp
from tests.cuda_offline import compile
from tests.test_mosaic_lowering import make_call
from xsake.kernels_pallas_gpu.triton import backend as triton
from xsake.kernels_pallas_gpu.triton.tiles import Tiling
bias = jnp.zeros((1, 1, 1, 128))
call = make_call(head_dim=16, q_len=128, kv_len=128, dtype=jnp.float32, bias=bias)
tiling = Tiling(q=16, kv=16, num_warps=4, num_stages=1)
config = triton.Config(forward=tiling, dq=tiling, dkv=tiling)
compile(lambda call: triton.forward(call, config), call, chip="sm_90", dump=dump)
(log,) = dump.glob("*xsake_triton_forward*triton-to-llvm*")
passes = log.read_text().split("// -----// IR Dump Before ")
after = 1 + next(n for n, text in enumerate(passes) if text.startswith("TritonCombineOps"))
made_by = dict(re.findall(r'(%\\w+) = "([\\w.]+)"', passes[after]))
begun = [made_by.get(name) for name in re.findall(r'= "tt.dot"\\(%\\w+, %\\w+, (%\\w+)\\)', passes[after])]
print(begun)
os._exit(0 if begun and begun.count("arith.constant") * 2 == len(begun) else 1)
"""


def test_triton_adds_the_bias_after_the_products():
    """Of the two products of a step, that of queries and keys begins with 0, and not with the bias."""
    run(BIAS_SCRIPT)


PAGED_SCRIPT = """
import os, sys, tempfile, pathlib
dump = pathlib.Path(tempfile.mkdtemp())
backend, chip, name = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
if backend == "mosaic":
    os.environ |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1"}
else:
    os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import importlib, paged_case
from tests.cuda_offline import compile, complaints
room = {"mosaic": "hopper", "triton": "triton"}[backend]
module = importlib.import_module(f"xsake.kernels_pallas_gpu.{room}.backend")
call = paged_case.call(**paged_case.COMPILED[name])
assert module.unsupported(call) is None
config = module.default_config(call)
report = compile(lambda call: module.forward(call, config), call, chip=chip, dump=dump)
assert backend == "triton" or any("registers" in line for line in report), "the assembler said nothing"
print("\\n".join(complaints(report)))
os._exit(0 if not complaints(report) else 1)
"""


@pytest.mark.parametrize(("backend", "chip"), [("mosaic", "sm_90"), ("triton", "sm_80"), ("triton", "sm_90")])
@pytest.mark.parametrize("name", paged_case.COMPILED)
def test_pages_compile(backend, chip, name):
    run(PAGED_SCRIPT, backend, chip, name)


RAW_TRITON = pytest.mark.skipif(bool(NO_JAX_TRITON), reason=f"not installed: {', '.join(NO_JAX_TRITON)}")


@RAW_TRITON
@pytest.mark.parametrize("name", raw_triton_offline.CALLS)
def test_raw_triton_compiles(name):
    """For sm_80, sm_86, sm_89 and sm_90."""
    run(
        "import sys; sys.path[:0] = ['src', 'tests']; from raw_triton_offline import table; print(table(sys.argv[1]))",
        name,
    )


RAW_TRITON_SCRIPT = """
import os, sys, pathlib, tempfile
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
from cuda_offline import compile, lower
from raw_triton_offline import CALLS, backward_arrays, launch, make_call, raw
launch.compute_capability = lambda: "8.0"
call = make_call(**CALLS["group 4, D 128"])
config = raw.default_config(call)
def everything(call, *given):
    return raw.forward(call, config), raw.backward(call, config, *given, with_bias=False)[:3]
assert lower(everything, call, *backward_arrays(call), chip="sm_80").count("@triton_kernel_call") == 3
compile(everything, call, *backward_arrays(call), chip="sm_80", dump=pathlib.Path(tempfile.mkdtemp()))
os._exit(0)
"""


@RAW_TRITON
def test_raw_triton_goes_through_jax_triton():
    run(RAW_TRITON_SCRIPT)


HADS_SCRIPT = """
import os, sys, pathlib, tempfile
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
from functools import partial
import hads_case, jax, jax.numpy as jnp
from cuda_offline import compile
from xsake.hads.selection import chunk, pooled_keys, program
from xsake.hads.mask.grid import Grid
from xsake.hads.profile.causal_grid import CausalGrid
chip, dtype, length, head_dim, block, block_q = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
profile = hads_case.random_profile(head_dim=head_dim, block=block, block_q=block_q)
grid = CausalGrid.of(length, block, block_q)
assert program.unsupported(head_dim, grid) is None
query, key = (jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype) for heads in (4, 2))
weights = jax.tree.map(jnp.asarray, (profile.estimator(0), profile.sensitivity[0], profile.burstiness[0]))
make = partial(program._by_kernels, grid, 4, 1000)
given = program.Given(query, key, *weights, {"count": jnp.int32(1000)})
compile(make, given, chip=chip, dump=pathlib.Path(tempfile.mkdtemp()))

first = grid.rows // 2  # the second half as a chunk of the prompt
begin = first * block_q
def chunk_of_prompt(query, key, cache, features, weights, number, answers):
    square = CausalGrid(length, block)
    pooled = pooled_keys.PooledKeys(pooled_keys._pool_by_kernel(square, begin // block, features, key, number))
    mask = Grid.of(block_q, block, length - begin, length, False, (None, begin))
    return chunk._by_kernels(grid, mask, first, chunk._Given(query, cache, pooled, weights, number, number, answers))
half = (jax.ShapeDtypeStruct((1, length - begin, heads, head_dim), dtype) for heads in (4, 2))
features = jax.ShapeDtypeStruct((1, 2, grid.columns, 5, head_dim), jnp.float32)
rest = features, chunk.LayerWeights.of(profile, 0), *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1,), (1, 2)))
compile(chunk_of_prompt, *half, key, *rest, chip=chip, dump=pathlib.Path(tempfile.mkdtemp()))
os._exit(0)
"""


STEP_SCRIPT = """
import os, sys, pathlib, tempfile
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
import hads_case, jax, jax.numpy as jnp
from cuda_offline import compile
from xsake.hads import LayerWeights, PooledKeys
from xsake.hads.profile.rule import RULE
from xsake.hads.selection import pooled_keys
from xsake.hads.selection.step import mask as step_mask
from xsake.hads.selection.step.blocks import StepRule
chip, tokens, q_heads, kv_heads, head_dim, blocks, batch = sys.argv[1], *map(int, sys.argv[2:])
features = jax.ShapeDtypeStruct((batch, kv_heads, blocks, 5, head_dim), jnp.float32)
keys = jax.ShapeDtypeStruct((batch, blocks * 64 - 5, kv_heads, head_dim), jnp.bfloat16)
query = jax.ShapeDtypeStruct((batch, tokens, q_heads, head_dim), jnp.bfloat16)
weights = LayerWeights.of(hads_case.random_profile(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim), 0)
assert step_mask.unsupported(64, PooledKeys(features)) is None
def everything(query, features, keys, weights, lengths):
    pooled = PooledKeys(pooled_keys._pool_last_by_kernel(64, 2, features, keys, lengths))
    rule = StepRule(0.1, blocks * kv_heads // 10, 64, RULE)
    return step_mask._by_kernels(rule, step_mask._Given(query, pooled, weights, lengths)), pooled
lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
compile(everything, query, features, keys, weights, lengths, chip=chip, dump=pathlib.Path(tempfile.mkdtemp()))
os._exit(0)
"""


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "of",  # tokens, query heads, KV heads, head_dim, blocks, batch
    [
        (1, 12, 2, 128, 512, 1),
        (1, 12, 2, 128, 512, 8),
        (3, 6, 1, 64, 37, 2),
        (8, 32, 8, 128, 2048, 1),
        (1, 16, 16, 64, 2048, 16),
        (2, 8, 1, 256, 300, 4),
    ],
    ids=str,
)
def test_step_kernels_compile(chip, of):
    run(STEP_SCRIPT, chip, *map(str, of))


DECODE_SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = ""  # one device: what jit may partition is not left to kernels
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src"), os.path.join(os.getcwd(), "tests")]
from decode_offline import kernels_per_layer, pretend_hopper
pretend_hopper()
dense, hads = (kernels_per_layer(batch=1, hads=hads) for hads in (False, True))
print(f"kernels per layer: {dense} dense, {hads} with HADS", flush=True)
os._exit(0 if dense < hads <= dense + 6 else 1)
"""


def test_a_decoding_step_with_hads_has_few_kernels_more():
    """Decoding waits for every kernel of every layer, however small."""
    run(DECODE_SCRIPT)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "of",  # dtype, length, head_dim, block, block_q
    [
        ("bfloat16", 32768, 64, 64, 64),
        ("bfloat16", 32768, 128, 64, 64),
        ("bfloat16", 131072, 256, 64, 64),
        ("bfloat16", 4000, 128, 64, 64),  # the last block is short
        ("float32", 4096, 128, 64, 64),
        ("bfloat16", 32768, 128, 32, 128),
        ("bfloat16", 131072, 64, 32, 128),
        ("bfloat16", 4000, 128, 32, 128),
        ("float32", 4096, 128, 16, 64),
    ],
    ids=str,
)
def test_mask_kernels_compile(chip, of):
    run(HADS_SCRIPT, chip, *map(str, of))
