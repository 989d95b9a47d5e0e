"""Groups of devices that communicate, and how long they take: one group per line of a mesh axis."""

from __future__ import annotations

import dataclasses

from xsake._plan.devices import Links

GIGA = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """`size` devices, of which `per_domain` share fast links; all of them do unless the group `crosses` domains."""

    size: int
    per_domain: int
    crosses: bool

    @classmethod
    def along(cls, size: int, *, stride: int, devices: int, domain: int) -> Group:
        """Every `stride`-th of `devices` devices, `size` of them; consecutive devices fill one domain after another.

        >>> Group.along(8, stride=2, devices=64, domain=8)
        Group(size=8, per_domain=4, crosses=True)
        """
        crosses = size > 1 and devices > domain and domain % (stride * size) != 0
        return cls(size=size, per_domain=max(1, min(size, domain // stride)) if crosses else size, crosses=crosses)


def collective_seconds(received: float, group: Group, links: Links) -> float:
    """An all-gather or a reduce-scatter in which each device receives `received` bytes.

    What comes from other domains enters a domain once, through the adapters of all of the group's devices there.
    """
    speed = min(links.inside, group.per_domain * links.outside) if group.crosses else links.inside
    return _seconds(received, speed, group, links)


def all_reduce_seconds(size: float, group: Group, links: Links) -> float:
    """A sum of `size` bytes over the group: a reduce-scatter and an all-gather."""
    return collective_seconds(2 * share_of_others(group.size) * size, group, links)


def hop_seconds(received: float, group: Group, links: Links) -> float:
    """Each device receives from its neighbour; where the ring crosses domains, all wait for the slowest pair."""
    return _seconds(received, min(links.hop, links.outside) if group.crosses else links.hop, group, links)


def exchange_seconds(received: float, group: Group, links: Links) -> float:
    """An all-to-all: what comes from other domains comes through the device's own adapter."""
    others = group.size - 1
    outside = (group.size - group.per_domain) / others if others else 0.0
    slower = max((1 - outside) / links.inside, outside / links.outside)
    return _seconds(received * slower, 1.0, group, links)


def share_of_others(size: int) -> float:
    """(n - 1) / n: the share of a sharded array that a device does not hold."""
    return (size - 1) / size


def _seconds(received: float, speed: float, group: Group, links: Links) -> float:
    return 0.0 if group.size == 1 else links.latency * 1e-6 + received / (speed * links.reach * GIGA)
