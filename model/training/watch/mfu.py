"""Model FLOP/s utilisation: FLOPs that the model needs, over the FLOPs that the devices could do in that time."""

from __future__ import annotations

# Dense bfloat16 FLOP/s from the vendors' data sheets, by the beginning of JAX's `device_kind`, most specific first.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """None for a device that is not in the table: better no number than a wrong one."""
    return next((peak for name, peak in PEAK_FLOPS.items() if device_kind.startswith(name)), None)


def utilisation(flops_per_token: float, tokens_per_second: float, device_kind: str, devices: int) -> float | None:
    """The share of all devices' peak FLOP/s that the model uses, or None where the peak is not known."""
    peak = peak_flops(device_kind)
    return None if peak is None else flops_per_token * tokens_per_second / (peak * devices)
