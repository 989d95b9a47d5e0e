"""The configurations of the Hopper backend, under their documented name."""

from xsake.kernels_pallas_gpu.hopper.backend import Config
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig, Pairing
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig

__all__ = ["BackwardConfig", "Config", "ForwardConfig", "FusedConfig", "Pairing"]
