"""Configurations are compiled, raced and verified here, in a process of their own."""
