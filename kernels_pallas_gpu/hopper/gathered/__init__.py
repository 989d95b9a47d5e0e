"""The dK/dV kernel that gathers chosen keys."""
