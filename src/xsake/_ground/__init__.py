"""Leaves that every room may use: tracing, devices, files, checked fields."""
