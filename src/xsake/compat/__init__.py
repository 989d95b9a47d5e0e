"""The names and signatures of other libraries, on top of XSAKE: `xsake.compat.ejkernel` and `xsake.compat.easydel`."""
