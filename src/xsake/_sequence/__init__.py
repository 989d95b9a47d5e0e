"""Sequences that are cut over devices."""
