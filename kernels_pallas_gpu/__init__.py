"""Pallas kernels for NVIDIA GPUs: `hopper` (Mosaic GPU), `triton` (Ampere and newer), and `lists`, small programs over
block lists. `mosaic` has the names of Hopper's configurations.
"""
