"""The trainer: steps, checkpoints, and runs that resume."""
