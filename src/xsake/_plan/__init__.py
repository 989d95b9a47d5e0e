"""`xsake plan`: predict time and memory of a step on many devices, from recorded kernels and stated link speeds."""
