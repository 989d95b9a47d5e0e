"""Entries, tables and plots of the results."""
