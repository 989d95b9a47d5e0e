"""The state of an NVIDIA GPU while something runs: clock, power, temperature, and the reasons for throttling."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from typing import Any

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


class Monitor:
    """A context in which `nvidia-smi` samples the chip; if it is not installed, there are no samples."""

    def __init__(self, milliseconds: int = 100):
        self._command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        self._command += ["-lms", str(milliseconds)]
        self._samples: list[tuple[float, list[str]]] = []
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Monitor:
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
