"""The resources that NVIDIA GPUs give to a kernel."""

from xsake._ground.device import core_count

# Bytes of shared memory per block of threads that opts in to them, by compute capability.
SHARED_MEMORY = {"8.0": 166912, "8.6": 101376, "8.7": 166912, "8.9": 101376, "9.0": 232448, "10.0": 232448}
REGISTERS_PER_THREAD = 255  # at most, of 32 bits


def shared_memory(capability: str) -> int:
    """Bytes per block of threads; for a capability that is not in the table, the smallest number of the table."""
    return SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))


# Hopper: H100 and H200, of compute capability 9.0.
HOPPER_SHARED_MEMORY = SHARED_MEMORY["9.0"]
HOPPER_SMS = 132  # of an H100 SXM and an H200; an H100 PCIe has 114, an H20 has 78
HOPPER_L2_BYTES = 50 << 20


def misfit(shared_memory: int) -> str | None:
    """Why Hopper has no room for so many bytes, or None."""
    if shared_memory > HOPPER_SHARED_MEMORY:
        return f"it needs {shared_memory} bytes of shared memory; {HOPPER_SHARED_MEMORY} are the limit"
    return None


def hopper_sms() -> int:
    """Streaming multiprocessors of this machine's GPU; without a GPU, ahead of time, as many as an H200 has."""
    return core_count() or HOPPER_SMS
