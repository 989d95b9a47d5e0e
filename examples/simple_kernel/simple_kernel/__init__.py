"""simple_kernel: dense attention as a backend of XSAKE, in a package of its own."""
