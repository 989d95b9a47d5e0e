"""Attention in which every query token chooses its own blocks of keys: NSA, MoBA, and their common parts."""
