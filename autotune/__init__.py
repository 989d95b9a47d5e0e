"""Workloads and how to time them."""
