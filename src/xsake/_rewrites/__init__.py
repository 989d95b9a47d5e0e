"""Calls that run in place of another call, and how its results become the other's."""
