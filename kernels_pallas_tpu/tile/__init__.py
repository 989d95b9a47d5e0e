"""A kernel's view of its operands: tiles of arrays, bits, bias and pages."""
