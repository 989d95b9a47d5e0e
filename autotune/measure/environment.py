"""Where tuning happens: the device, the software versions, and the load and clocks of the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

import xsake

_PACKAGES = ("jax", "jaxlib", "triton", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_CLOCKS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The device and its environment, as seen by the process that holds the device."""

    device_kind: str
    platform: str
    environment: dict[str, Any]

    @property
    def environment_id(self) -> str:
        """A short hash of `environment`."""
        return hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:8]


def facts() -> Facts:
    import jax

    device = jax.local_devices()[0]
    environment = {
        "versions": {"xsake": xsake.__version__} | {name: v for name in _PACKAGES if (v := _version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    if device.platform == "gpu":
        environment["driver"] = _nvidia_smi("driver_version")[0]
    if device.platform == "cpu":
        environment["processor"] = _processor()
    return Facts(device.device_kind, device.platform, environment)


def conditions(platform_name: str) -> dict[str, Any]:
    """Load, clocks, temperature and power at this moment, as far as the machine reports them."""
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    if platform_name == "gpu":
        values = _nvidia_smi(*_CLOCKS.values())
        found |= {name: float(v) for name, v in zip(_CLOCKS, values, strict=True) if v and v[0].isdigit()}
    return found


def _nvidia_smi(*fields: str) -> list[str | None]:
    """The fields of the first GPU; all None if nvidia-smi fails."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    return [value.strip() for value in line.split(",")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
