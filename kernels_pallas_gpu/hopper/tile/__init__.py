"""What the kernels share inside a tile: operands, element tests, logits, products, packing."""
