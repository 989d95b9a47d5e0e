"""The choice of blocks as GPU kernels."""
