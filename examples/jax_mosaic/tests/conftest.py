"""Two simulated devices for the checks of meshes, and less time in the compiler. Before JAX is imported."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=2",
        "--xla_backend_optimization_level=0",
    ]
).strip()
