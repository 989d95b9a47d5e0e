"""The fused backward: dQ, dK and dV in one kernel."""
