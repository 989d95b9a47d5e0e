"""The choice of blocks over several devices."""
