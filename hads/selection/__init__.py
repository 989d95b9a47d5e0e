"""From a layer's queries and keys to its mask: estimate, gain and choice, by XLA and by GPU kernels."""
