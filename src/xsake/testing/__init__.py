"""The contract of `xsake.attention` as checks for any backend: a float64 reference, cases, and tolerances."""
