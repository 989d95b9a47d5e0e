"""The study: HADS beside fixed patterns, published methods and oracles, at exactly equal numbers of blocks."""
