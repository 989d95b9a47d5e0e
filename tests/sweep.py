"""Parameters of which CI takes a part, and `make slow` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """`values` for pytest.mark.parametrize; those that are `slow` reach no code that the others leave out."""
    values = list(values)
    assert all(value in values for value in slow), slow
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]
