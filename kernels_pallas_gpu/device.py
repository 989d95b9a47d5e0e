"""Which GPU this is."""

from __future__ import annotations

import jax


def compute_capability() -> str | None:
    """Of the first local GPU, such as "9.0"; None without one, or where it is not NVIDIA's."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.replace(".", "", 1).isdigit() else None
