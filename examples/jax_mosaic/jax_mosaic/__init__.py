"""jax_mosaic: the attention that comes with JAX for Hopper GPUs, as a backend of XSAKE."""
