"""Attention of other projects as contestants, a file per project; each imports its project's package."""
