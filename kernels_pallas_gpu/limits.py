"""What NVIDIA GPUs give to a kernel."""

# Bytes of shared memory per block of threads that opts in to them, by compute capability.
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.7": 166912, "8.9": 101376, "9.0": 232448, "10.0": 232448}
REGISTERS_PER_THREAD = 255  # at most, of 32 bits


def shared_memory(capability: str) -> int:
    """Bytes per block of threads; for a capability that is not in the table, the smallest number of the table."""
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


# Hopper: H100 and H200, of compute capability 9.0.
HOPPER_SHARED_MEMORY = SHARED_MEMORY["9.0"]
HOPPER_SMS = 132
HOPPER_L2_BYTES = 50 << 20
