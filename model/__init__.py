"""A small Flax language model on block-sparse attention: train it, load a pretrained one, generate."""
