"""Compile the kernels for a TPU that is not here: `python -m xsake.kernels_pallas_tpu.ahead [TOPOLOGY ...]`.

It needs libtpu (pip install "jax[tpu]"), which compiles for any topology without the hardware. The forward, dQ and
dK/dV kernels of every workload below are compiled with their default configuration. A kernel that Mosaic does not
accept, or that does not fit in VMEM or SMEM, fails here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.backend.contract import Call
from xsake.hads.mask.band import Band
from xsake.hads.mask.bitmaps import words_of
from xsake.hads.mask.block_mask import BlockMask
from xsake.kernels_pallas_tpu import config as configs
from xsake.kernels_pallas_tpu import kernel_dkv, kernel_dq, kernel_forward

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
KERNELS = ("forward", "dq", "dkv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The shapes of a call; `options` names the optional arguments that the call has."""

    name: str
    batch: int = 1
    q_len: int = 4096
    kv_len: int = 4096
    q_heads: int = 2
    kv_heads: int = 2
    mask_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    block_q: int = 512
    block_kv: int = 512
    is_causal: bool = True
    window: tuple[int | None, int | None] | None = None
    dtype: str = "bfloat16"
    options: frozenset[str] = frozenset()
    bias: tuple[int, int, int, int] | None = None
    page: int | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        return KERNELS if self.page is None else ("forward",)

    def call(self, sharding: Any = None) -> Call:
        """The call, with a `jax.ShapeDtypeStruct` in place of each array."""

        def array(*shape: int, dtype: Any = self.dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def tokens(option: str, length: int) -> Any:
            return array(self.batch, length, dtype=jnp.int32) if option in self.options else None

        pages = None if self.page is None else self.kv_len // self.page
        tokens_of_kv = (self.batch, self.kv_len) if self.page is None else (self.batch * pages, self.page)
        rows, columns = -(-self.q_len // self.block_q), -(-self.kv_len // self.block_kv)
        allowed = (
            rows * columns
            if not self.is_causal
            else sum(min(columns, (i + 1) * self.block_q // self.block_kv + 1) for i in range(rows))
        )
        lists = {}
        for prefix, n, order in (("kv", rows, "row_order"), ("q", columns, "col_order")):
            shape = (1, self.mask_heads)
            lists[f"{prefix}_indices"] = array(*shape, allowed, dtype=jnp.int32)
            lists[f"{prefix}_row_ptr"] = array(*shape, n + 1, dtype=jnp.int32)
            lists[f"{prefix}_num_full"] = lists[order] = array(*shape, n, dtype=jnp.int32)
        if "bitmaps" in self.options or "row bits" in self.options:
            columns_of_bits = self.block_kv if "bitmaps" in self.options else 1
            lists["kv_bitmap"] = lists["q_bitmap"] = lists["kv_indices"]
            lists["bitmaps"] = array(1, 1, 64, columns_of_bits, words_of(self.block_q), dtype=jnp.uint32)
        mask = BlockMask(
            **lists,
            block_q=self.block_q,
            block_kv=self.block_kv,
            q_len=self.q_len,
            kv_len=self.kv_len,
            is_causal=self.is_causal,
            local_window_size=self.window,
            density_hint=None,
            complete=True,
        )
        return Call(
            query=array(self.batch, self.q_len, self.q_heads, self.head_dim),
            key=array(*tokens_of_kv, self.kv_heads, self.head_dim),
            value=array(*tokens_of_kv, self.kv_heads, self.value_dim),
            mask=mask,
            bias=None if self.bias is None else array(*self.bias),
            q_segments=tokens("segments", self.q_len),
            kv_segments=tokens("segments", self.kv_len),
            q_positions=tokens("positions", self.q_len),
            kv_positions=tokens("positions", self.kv_len),
            sink_lse=array(1, self.q_heads, dtype=jnp.float32) if "sinks" in self.options else None,
            band=Band.of(self.is_causal, self.window),
            scale=self.head_dim**-0.5,
            soft_cap=30.0 if "cap" in self.options else None,
            page_table=None if pages is None else array(self.batch, pages, dtype=jnp.int32),
        )


def _options(*names: str) -> frozenset[str]:
    return frozenset(names)


CACHE: dict[str, Any] = dict(
    batch=2,
    q_len=512,
    kv_len=8192,
    q_heads=8,
    kv_heads=2,
    mask_heads=2,
    block_q=128,
    block_kv=128,
    page=128,
    is_causal=False,
)
LONG: dict[str, Any] = dict(q_len=131072, kv_len=131072, q_heads=32, kv_heads=8, mask_heads=32)
WORKLOADS = (
    Workload(name="block 512"),
    Workload(name="block 1024", block_q=1024, block_kv=1024),
    Workload(name="block 128", block_q=128, block_kv=128),
    Workload(name="block 64", block_q=64, block_kv=64),
    Workload(name="block 16", block_q=16, block_kv=16, q_len=1024, kv_len=1024),
    Workload(name="head_dim 64", head_dim=64, value_dim=64),
    Workload(name="head_dim 64, block 128", head_dim=64, value_dim=64, block_q=128, block_kv=128),
    Workload(name="head_dim 256", head_dim=256, value_dim=256),
    Workload(name="value_dim 80", head_dim=192, value_dim=80),
    Workload(name="float32", dtype="float32"),
    Workload(name="float32, block 128", dtype="float32", block_q=128, block_kv=128),
    Workload(name="length 1000", q_len=1000, kv_len=1000),
    Workload(name="length 1000, block 128", q_len=1000, kv_len=1000, block_q=128, block_kv=128, is_causal=False),
    Workload(name="odd blocks", q_len=1000, kv_len=1500, block_q=100, block_kv=72),
    Workload(name="uneven blocks", q_len=3000, kv_len=3000, block_q=384, block_kv=1408),
    Workload(name="decode", q_len=1, kv_len=8192, q_heads=8, kv_heads=2, mask_heads=2, block_q=128, is_causal=False),
    Workload(name="prefill on a cache", q_len=512, kv_len=8192, is_causal=False, options=_options("positions")),
    Workload(
        name="decode from pages",
        **CACHE | dict(q_len=1, q_heads=32, kv_heads=8, mask_heads=8),
        options=_options("segments", "positions"),
    ),
    Workload(name="decode from pages of 1024", **CACHE | dict(q_len=1, page=1024), options=_options("segments")),
    Workload(name="decode from float32 pages", **CACHE | dict(q_len=1, dtype="float32"), options=_options("segments")),
    Workload(name="one head in pages", **CACHE | dict(q_len=4, kv_heads=1, mask_heads=1), options=_options("segments")),
    Workload(name="six heads in pages", **CACHE | dict(q_heads=12, kv_heads=6, mask_heads=6)),
    Workload(name="prefill from pages", **CACHE, options=_options("segments", "positions")),
    Workload(name="group", q_heads=8, kv_heads=2, mask_heads=2, block_q=128, block_kv=128),
    Workload(name="multi-query", q_heads=8, kv_heads=1, mask_heads=8),
    Workload(name="window", window=(1024, 0)),
    Workload(name="segments", batch=2, options=_options("segments")),
    Workload(name="segments, block 64", block_q=64, block_kv=64, options=_options("segments")),
    Workload(name="positions, segments", options=_options("segments", "positions"), window=(1024, 0)),
    Workload(name="sinks, cap", options=_options("sinks", "cap")),
    Workload(name="bitmaps", options=_options("bitmaps")),
    Workload(
        name="bitmaps, odd blocks", block_q=100, block_kv=72, q_len=1000, kv_len=1500, options=_options("bitmaps")
    ),
    Workload(
        name="row bits, group",
        q_heads=8,
        kv_heads=2,
        mask_heads=2,
        block_q=16,
        block_kv=64,
        options=_options("row bits"),
    ),
    Workload(name="bias", bias=(1, 2, 4096, 4096)),
    Workload(name="bias, block 128", bias=(1, 1, 4096, 4096), block_q=128, block_kv=128),
    Workload(
        name="bias of keys, group", bias=(1, 8, 1, 4096), q_heads=8, kv_heads=2, mask_heads=2, block_q=128, block_kv=128
    ),
    Workload(name="bias of queries", bias=(1, 2, 4096, 1)),
    Workload(name="float32 bias, cap", bias=(1, 2, 4096, 4096), dtype="float32", options=_options("cap")),
    Workload(name="131072 tokens, block 512", **LONG),
    Workload(name="131072 tokens, block 128", **LONG, block_q=128, block_kv=128),
)
CORE = (
    "block 512",
    "block 1024",
    "block 128",
    "head_dim 64",
    "float32",
    "length 1000",
    "decode",
    "decode from pages",
    "group",
    "positions, segments",
    "sinks, cap",
    "bitmaps",
    "row bits, group",
    "bias",
    "131072 tokens, block 512",
    "131072 tokens, block 128",
)


def lower(workload: Workload, kernel: str, config: Any = None, sharding: Any = None) -> Any:
    """The lowered kernel. With the sharding of `one_device` it can be compiled; without, it is only lowered for TPU."""
    call = workload.call(sharding)
    config = config or configs.default_config(call)
    stat = jax.ShapeDtypeStruct((workload.batch, workload.q_heads, workload.q_len), jnp.float32, sharding=sharding)
    d_out = jax.ShapeDtypeStruct(
        (workload.batch, workload.q_len, workload.q_heads, workload.value_dim), workload.dtype, sharding=sharding
    )
    if kernel == "forward":
        traced = jax.jit(lambda c: kernel_forward.forward(c, config.forward)).trace(call)
    elif kernel == "dq":
        traced = jax.jit(lambda c, *g: kernel_dq.dq(c, config.dq, *g)).trace(call, stat, stat, d_out)
    else:
        traced = jax.jit(lambda c, *g: kernel_dkv.dkv(c, config.dkv, *g)).trace(call, stat, stat, d_out)
    return traced.lower() if sharding is not None else traced.lower(lowering_platforms=("tpu",))


def one_device(topology: str) -> Any:
    """A sharding on one device of a topology; the device need not be on this machine."""
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[:1]
    return NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())


def without_hardware() -> None:
    """Makes libtpu load on a machine without a TPU; call it before anything asks for devices."""
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")


def sweep(
    topology: str, workloads: Sequence[Workload] = WORKLOADS, kernels: Sequence[str] = KERNELS
) -> Iterator[tuple[Workload, str, str | None]]:
    """Compiles with default configurations; yields (workload, kernel, what went wrong or None) after each kernel."""
    sharding = one_device(topology)
    for workload in workloads:
        for kernel in [kernel for kernel in kernels if kernel in workload.kernels]:
            try:
                lower(workload, kernel, sharding=sharding).compile()
                yield workload, kernel, None
            except Exception as error:  # report every failure, not the first alone
                yield workload, kernel, f"{type(error).__name__}: {str(error)[:600]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topology", nargs="*", default=TOPOLOGIES, help=f"of {TOPOLOGIES} by default")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--core", action="store_true", help=f"only {', '.join(CORE)}")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    args = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        print('skipped: libtpu is not installed here (pip install "jax[tpu]")')
        return 0
    without_hardware()
    print(f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}")
    chosen = [w for w in WORKLOADS if args.only in w.name and (not args.core or w.name in CORE)]
    failed = 0
    for topology in args.topology:
        start, count = time.time(), 0
        for workload, kernel, problem in sweep(topology, chosen, args.kernel or KERNELS):
            if problem:
                failed += 1
                print(f"FAILED {topology} {workload.name!r} {kernel}: {problem}", flush=True)
            else:
                count += 1
                if args.verbose:
                    print(f"{topology} {workload.name!r} {kernel}: at {time.time() - start:.1f} s", flush=True)
        print(f"{topology}: {count} kernels compiled in {time.time() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # libtpu's teardown can crash where there is no TPU, after all the work is done
