"""What the kernels share: the work inside a tile, its operands, and the order of the tiles."""
