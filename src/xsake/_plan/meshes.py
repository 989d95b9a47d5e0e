"""Meshes data x model x sequence of a number of devices, and why a model cannot run on one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from xsake._plan.groups import Group
from xsake._plan.question import Question


@dataclasses.dataclass(frozen=True, order=True)
class Mesh:
    """Neighbouring devices lie along `model`, then along `sequence`, then along `data`."""

    data: int
    model: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.data}x{self.model}x{self.sequence}"

    @property
    def devices(self) -> int:
        return self.data * self.model * self.sequence

    def model_group(self, domain: int) -> Group:
        return Group.along(self.model, stride=1, devices=self.devices, domain=domain)

    def sequence_group(self, domain: int) -> Group:
        return Group.along(self.sequence, stride=self.model, devices=self.devices, domain=domain)

    def data_group(self, domain: int) -> Group:
        return Group.along(self.data, stride=self.model * self.sequence, devices=self.devices, domain=domain)

    def weights_group(self, domain: int) -> Group:
        """The devices along `data` and `sequence`, which compute with the same weights."""
        return Group.along(self.data * self.sequence, stride=self.model, devices=self.devices, domain=domain)


def parse_mesh(text: str) -> Mesh:
    """
    >>> parse_mesh("8x1x8")
    Mesh(data=8, model=1, sequence=8)
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"mesh={text!r} must be three numbers of devices, data x model x sequence, as in 8x1x8")
    return Mesh(*map(int, parts))


def every_mesh(devices: int) -> Iterator[Mesh]:
    """Every data x model x sequence whose product is `devices`.

    >>> [str(mesh) for mesh in every_mesh(2)]
    ['1x1x2', '1x2x1', '2x1x1']
    """
    for data in _divisors(devices):
        for model in _divisors(devices // data):
            yield Mesh(data, model, devices // data // model)


def mesh_problem(mesh: Mesh, q: Question) -> str | None:
    """Why the model cannot run on this mesh, or None."""
    if q.batch % mesh.data:
        return f"data={mesh.data} does not divide the batch of {q.batch}"
    for name in ("kv_heads", "mlp_width", "vocab_size"):
        if getattr(q.config, name) % mesh.model:
            return f"model={mesh.model} does not divide the model's {name}={getattr(q.config, name)}"
    if mesh.sequence > 1 and q.tokens % (2 * mesh.sequence * q.block):
        return (
            f"sequence={mesh.sequence} needs two chunks of whole blocks per device (zigzag), and {q.tokens} tokens are "
            f"no multiple of 2 * {mesh.sequence} * {q.block}"
        )
    return None


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
