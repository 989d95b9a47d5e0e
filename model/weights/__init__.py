"""Weights in files: GGUF, safetensors, and published models."""
