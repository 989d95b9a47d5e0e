"""Several processes, one program: each process sees its own devices, and the mesh holds the devices of all."""

from __future__ import annotations

import jax


def initialize(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the other processes. Call this before anything else touches a device.

    On Slurm, Open MPI, Kubernetes and Cloud TPU, JAX finds the three arguments by itself: give None. Elsewhere give
    all: the address "host:port" of process 0, the number of processes, and the number of this process.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"give all of {', '.join(given)}, or none of them; missing: {', '.join(missing)}")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ValueError(f"{process=} must be from 0 to {processes - 1} with {processes=}")
    jax.distributed.initialize(coordinator_address=coordinator, num_processes=processes, process_id=process)
