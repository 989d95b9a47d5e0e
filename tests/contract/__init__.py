"""The contract of `xsake.attention`, told once: a float64 reference, cases, and who must meet it."""
