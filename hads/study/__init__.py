"""The study: HADS beside patterns, block-level versions of other methods, and oracles, at equal block counts."""
