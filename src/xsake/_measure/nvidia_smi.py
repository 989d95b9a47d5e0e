"""What `nvidia-smi` says of the GPU that JAX uses: driver, clocks, power, temperature, the reasons for throttling."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Any

import jax

_NUMBERS = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_FIELDS = (*_NUMBERS.values(), "clocks_event_reasons.active")
_REASONS = {
    0x1: "idle",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
}


def gpu_of_this_process() -> str | None:
    """The PCI bus of the first GPU that JAX uses here, by which `nvidia-smi` finds it; None without one.

    CUDA counts the GPUs of CUDA_VISIBLE_DEVICES in the order of CUDA_DEVICE_ORDER; `nvidia-smi` counts all of them, in
    an order of its own.
    """
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), device.local_hardware_id)
        failed = failed or cuda.cuDeviceGetPCIBusId(name, len(name), handle)
    except (OSError, AttributeError):
        return None
    return None if failed else name.value.decode()


def read(gpu: str | None, *fields: str) -> list[str | None]:
    """What `nvidia-smi` says of a GPU; all None without a GPU or if it fails."""
    if gpu is None:
        return [None] * len(fields)
    try:
        done = subprocess.run(_query(gpu, fields), capture_output=True, text=True, timeout=10, check=True)
        line = done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    return [value.strip() for value in line.split(",")]


def _query(gpu: str, fields: Iterable[str]) -> list[str]:
    return ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


class Monitor:
    """A context in which `nvidia-smi` samples a GPU; without a GPU, or if it is not installed, there are no samples."""

    def __init__(self, gpu: str | None, milliseconds: int = 100):
        self._command = [] if gpu is None else [*_query(gpu, _FIELDS), "-lms", str(milliseconds)]
        self._samples: list[tuple[float, list[str]]] = []
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Monitor:
        if not self._command:
            return self
        try:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._samples.append((time.monotonic(), [word.strip() for word in line.split(",")]))

    def during(self, spans: list[tuple[float, float]]) -> dict[str, Any]:
        """Medians over the samples inside the spans, and all reasons for throttling; {} without samples.

        A number that the GPU does not tell ("[N/A]") is left out.
        """
        inside = [s for at, s in list(self._samples) if any(a <= at <= b for a, b in spans) and len(s) == len(_FIELDS)]
        if not inside:
            return {}
        *columns, active = ([word for word in column if word[:1].isdigit()] for column in zip(*inside, strict=True))
        numbers = {name: statistics.median(map(float, c)) for name, c in zip(_NUMBERS, columns, strict=True) if c}
        reasons = [name for bit, name in _REASONS.items() if any(int(word, 16) & bit for word in active)]
        return numbers | {"throttled_by": reasons, "samples": len(inside)}
