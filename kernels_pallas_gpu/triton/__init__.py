"""The Pallas-Triton backend, for NVIDIA GPUs from Ampere on."""

from xsake.kernels_pallas_gpu.triton.backend import Config
from xsake.kernels_pallas_gpu.triton.tiles import Tiling

__all__ = ["Config", "Tiling"]
