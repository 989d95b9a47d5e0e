"""Tuned configurations, one JSON file a device kind, and their reader."""
