"""The kinds of values in configurations, and in files that are given to xsake.

Files come from anywhere, so nothing is assumed of a value: it may be of any type, huge, or not a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field may hold: whether it `allows` a value, and the allowed values in `words`."""

    allows: Callable[[Any], bool]
    words: str

    def __str__(self) -> str:
        return self.words


LARGEST_INT = 2**31 - 1  # JAX counts tokens and indexes arrays in int32
LARGEST_FLOAT = 3.4028234e38  # of float32

FLAG = Kind(lambda value: isinstance(value, bool), "True or False")
TEXT = Kind(lambda value: isinstance(value, str), "text")
TABLE = Kind(lambda value: isinstance(value, dict), "a table of names and values")  # from JSON: the names are text


def whole(least: int = 1, most: int = LARGEST_INT, multiple_of: int = 1) -> Kind:
    """An int; True and 2.0 do not count as ints."""
    words = f"an int of at least {least} and at most {most}"
    return Kind(
        lambda value: type(value) is int and least <= value <= most and value % multiple_of == 0,
        words if multiple_of == 1 else f"{words}, and a multiple of {multiple_of}",
    )


def number(*, above: float = -inf, least: float = -inf, below: float = inf, most: float = inf) -> Kind:
    """A finite int or float, within the bounds that are given."""
    bounds = {"above": above, "at least": least, "below": below, "at most": most}
    words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if abs(bound) != inf)
    return Kind(
        # Compared without conversion: an int may be too large for a float.
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and -LARGEST_FLOAT <= value <= LARGEST_FLOAT
            and above < value < below
            and least <= value <= most
        ),
        f"a finite number, {words}" if words else "a finite number",
    )


def one_of(*choices: Any) -> Kind:
    """One of a few values; True is not taken for 1, nor 2.0 for 2."""
    types = [(type(choice), choice) for choice in choices]
    return Kind(
        lambda value: any(type(value) is kind and value == choice for kind, choice in types),
        f"one of {', '.join(map(str, choices))}",
    )


def maybe(kind: Kind) -> Kind:
    return Kind(lambda value: value is None or kind.allows(value), f"None, or {kind}")


def list_of(item: Kind) -> Kind:
    return Kind(lambda value: isinstance(value, list) and all(map(item.allows, value)), f"a list, and each item {item}")
