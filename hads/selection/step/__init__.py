"""The choice of blocks for a few new tokens, from pooled keys alone."""
