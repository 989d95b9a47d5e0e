"""Token files for training."""
