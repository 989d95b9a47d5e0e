"""CUDA without a GPU: lower with plain CPU jax; compile to machine code where the compiler is installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from xsake.kernels_pallas_gpu.limits import HOPPER_L2_BYTES, HOPPER_SMS, SHARED_MEMORY

CHIPS = {  # name, compute capability, streaming multiprocessors
    "sm_80": ("NVIDIA A100-SXM4-80GB", 8, 108),
    "sm_90": ("NVIDIA H100 80GB HBM3", 9, HOPPER_SMS),
}
_TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: {per_core} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
 l2_cache_size: {l2} clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: {optin}
 cuda_compute_capability {{ major: {major} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} device_description_str: "{name}"
"""


def _mesh(chip: str) -> AbstractMesh:
    device = AbstractDevice(device_kind=CHIPS[chip][0], num_cores=None, platform="gpu")
    return AbstractMesh((), (), abstract_device=device)


def lower(function: Callable, *avals: Any, chip: str = "sm_90", **named: Any) -> str:
    """Lower for CUDA; raises if a layout is wrong or shared memory does not suffice."""
    with use_abstract_mesh(_mesh(chip)):
        return jax.jit(function).trace(*avals, **named).lower(lowering_platforms=("cuda",)).as_text()


def compile(function: Callable, *avals: Any, chip: str, dump: Path) -> list[str]:
    """The assembler's report of a compilation to machine code. `dump` is where MOSAIC_GPU_DUMP_TO points."""
    before = set(dump.rglob("*"))
    on_chip(chip, jax.jit(function).lower, *avals)
    reports = [p.read_text() for p in sorted(set(dump.rglob("*")) - before) if "ptxas" in p.name]
    return [line for text in reports for line in text.splitlines()]


def on_chip(chip: str, lower: Callable, *avals: Any) -> Any:
    """`lower(*avals)` compiled to machine code, for arguments that are on the chip."""
    where = SingleDeviceSharding(chips(chip)[0])
    # Nothing of the CPU's gets in.
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), avals)
    with use_abstract_mesh(_mesh(chip)):
        return lower(*avals).compile()


def chips(chip: str, number: int = 1) -> Sequence[jax.Device]:
    """Of one host, for the compiler only."""
    from jax.experimental import topologies

    name, major, cores = CHIPS[chip]
    optin = SHARED_MEMORY[f"{major}.0"]
    per_core = optin + 1024  # which the driver keeps
    target = _TARGET.format(name=name, major=major, cores=cores, per_core=per_core, optin=optin, l2=HOPPER_L2_BYTES)
    options = dict(topology_name="", topology=f"1x{number}x1", target_config=target)
    return topologies.get_topology_desc(platform="cuda", **options).devices


def complaints(report: Sequence[str]) -> list[str]:
    """Lines that speak of spilled registers, or of tensor-core products that the assembler serialised or waits for.

    Message C7519 is no complaint: a fence before a product whose left operand is in registers.
    """
    bad = re.compile(r"C75(?!19)\d\d|erializ|[1-9]\d* bytes spill")
    return [line for line in report if bad.search(line)]
