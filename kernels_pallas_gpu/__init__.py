"""Pallas kernels for NVIDIA GPUs, one module per lowering: `mosaic` (Hopper) and `triton` (Ampere and newer)."""
