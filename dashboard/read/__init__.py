"""Readers of what training, tuning and evaluation write."""
