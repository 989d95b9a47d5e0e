"""Numbers as pages write them, read back."""

from __future__ import annotations

import math
import re

_FACTORS = {"": 1, "%": 0.01, "k": 1e3, "M": 1e6, "G": 1e9, "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "×": 1}
_NUMBER = re.compile(r"([+-]?[\d,]*\.?\d+(?:e-?\d+)?)\s*(%|k|M|G|ns|µs|ms|s|×)?(?:\s|$)")


def read_number(text: str) -> float:
    """The first number of a text, in its unit.

    >>> read_number("473.6 µs"), read_number("+3.46%"), read_number("873k tokens")
    (0.0004736, 0.0346, 873000.0)
    """
    found = _NUMBER.match(text.strip())
    assert found, f"{text!r} begins with no number"
    digits, unit = found.groups()
    return float(f"{float(digits.replace(',', '')) * _FACTORS[unit or '']:.10g}")


def same(text: str, value: float, digits: int = 4) -> bool:
    """Whether `text` is `value`, rounded to at least `digits` digits."""
    return math.isclose(read_number(text), value, rel_tol=0.51 * 10 ** (1 - digits), abs_tol=1e-12)
