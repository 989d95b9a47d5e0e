"""What some methods must know of a model beyond its HADS profile: its methods, its file, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.hads import kascade, minference, v1, x_heads


class Kind(NamedTuple):
    """`file` begins the file's name. `measure(model, tokens, block)` makes the knowledge from calibration texts, and
    `shape(config)` has shapes in place of its arrays."""

    file: str
    what: str
    methods: frozenset[str]
    type: Any
    measure: Callable[..., Any]
    shape: Callable[[Any], Any]


KINDS = (
    Kind("v1", "the heads for HADS-v1", v1.NAMES, v1.V1Profile, v1.measure, v1.shape),
    Kind(
        "x-heads",
        "the heads' thresholds for XAttention",
        x_heads.NAMES,
        x_heads.Thresholds,
        x_heads.measure,
        x_heads.shape,
    ),
    Kind(
        "minference",
        "the heads' patterns for MInference",
        minference.NAMES,
        minference.Patterns,
        minference.measure,
        minference.shape,
    ),
    Kind("kascade", "the anchor layers for Kascade", kascade.NAMES, kascade.Plan, kascade.measure, kascade.shape),
)


def kind_of(method: str) -> Kind | None:
    """The kind of knowledge that a method needs; None for most."""
    return next((kind for kind in KINDS if method in kind.methods), None)
