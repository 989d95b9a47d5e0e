"""Pallas kernels for NVIDIA GPUs, a module a lowering."""
