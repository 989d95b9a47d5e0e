"""The dK/dV kernel that gathers, for each block of keys, only the queries that chose it."""
