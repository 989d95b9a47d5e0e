"""The dQ kernel."""
