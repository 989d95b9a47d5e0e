"""The dK/dV kernel."""
