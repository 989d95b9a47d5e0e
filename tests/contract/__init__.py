"""The contract of `xsake.attention`, stated once: a float64 reference, cases, and the implementations to test."""
