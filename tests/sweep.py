"""Parameters of a test, some of which run in CI and all of which run in `make slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """`values` for pytest.mark.parametrize. Values in `slow` reach no code that the other values do not reach."""
    values = list(values)
    assert all(value in values for value in slow), slow
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]
