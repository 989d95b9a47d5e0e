"""Devices and their links: constants from the makers' data sheets, in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from xsake.model.training.watch.mfu import peak_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links between devices. Speeds are in GB/s (1e9 bytes), in one direction, per device.

    Args:
      domain: neighbouring devices that fast links join: a node with NVLink, a slice with ICI.
      inside: what a device receives in a collective within a domain.
      hop: what a device receives from one neighbour within a domain.
      outside: what a device receives from another domain.
      reach: the share of these speeds that collectives reach.
      latency: microseconds before a collective or a hop moves its first byte.
    """

    domain: int
    inside: float
    hop: float
    outside: float
    reach: float = 0.8
    latency: float = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator.

    Args:
      kind: JAX's name for it, or the beginning of that name.
      recorded_as: the kind whose recorded throughputs are used.
      memory: GB.
      bandwidth: of the memory, in GB/s.
      cores: streaming multiprocessors; a device with fewer tiles of queries than cores is partly idle.
      link_names: of the links inside and outside a domain.
      note: what a reader must know of its numbers.
    """

    name: str
    kind: str
    recorded_as: str
    memory: float
    bandwidth: float
    cores: int
    links: Links
    link_names: tuple[str, str]
    note: str = ""

    @property
    def peak(self) -> float:
        """Dense bfloat16 FLOP/s."""
        found = peak_flops(self.kind)
        assert found is not None, f"{self.kind} has no peak in xsake.model.training.watch.mfu"
        return found


# NVLink 4: 900 GB/s both ways. InfiniBand: one adapter of 400 Gb/s per GPU. ICI: 50 or 100 GB/s per link and direction;
# a collective along one axis of the torus uses two links. Between slices of TPUs: the host's network over its chips.
_gpu = partial(
    Device,
    recorded_as="NVIDIA H200",
    cores=132,
    links=Links(domain=8, inside=450.0, hop=450.0, outside=50.0),
    link_names=("NVLink", "InfiniBand"),
)
_tpu = partial(
    Device,
    cores=1,
    link_names=("ICI", "data centre network"),
    note="Attention throughputs are cycles of the compiler's schedules: these kernels never ran on a TPU, and waiting "
    "for memory is in no schedule.",
)
_H100 = "Nothing was recorded on an H100 (SXM): it is taken to be as fast as the H200, whose chip it shares."
_V5E = Links(domain=256, inside=100.0, hop=50.0, outside=3.1)
_V6E = Links(domain=256, inside=200.0, hop=100.0, outside=12.5)
_ALL = (
    _gpu(name="h200", kind="NVIDIA H200", memory=141.0, bandwidth=4800.0),
    _gpu(name="h100", kind="NVIDIA H100 80GB HBM3", memory=80.0, bandwidth=3350.0, note=_H100),
    _tpu(name="tpu-v5e", kind="TPU v5 lite", recorded_as="TPU v5 lite", memory=16.0, bandwidth=800.0, links=_V5E),
    _tpu(name="tpu-v6e", kind="TPU v6 lite", recorded_as="TPU v6 lite", memory=32.0, bandwidth=1600.0, links=_V6E),
)
DEVICES = {device.name: device for device in _ALL}


def find_device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"device={name!r} is not known; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def override_links(links: Links, given: Sequence[str]) -> Links:
    """Links with some values replaced, each given as NAME=VALUE.

    >>> override_links(DEVICES["h200"].links, ["outside=25", "domain=4"]).outside
    25.0
    """
    fields = {field.name: field.type for field in dataclasses.fields(Links)}
    values: dict[str, int | float] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in fields:
            raise ValueError(f"link={text!r} must be NAME=VALUE, where NAME is one of {', '.join(fields)}")
        values[name] = _positive(text, value, whole=fields[name] == "int")
        if name == "reach" and values[name] > 1:
            raise ValueError(f"link={text!r}: reach is a share, at most 1")
    return dataclasses.replace(links, **values)  # type: ignore[arg-type]


def _positive(text: str, value: str, *, whole: bool) -> int | float:
    try:
        number: int | float = int(value) if whole else float(value)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise ValueError(f"link={text!r}: the value must be a positive {'whole ' if whole else ''}number")
    return number
