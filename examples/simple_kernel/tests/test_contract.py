"""The kernel does what XSAKE's contract says. `XSAKE_CHECKS=all` runs every check, not one of each kind."""

from __future__ import annotations

import os

import pytest

import xsake
from xsake.testing import assert_holds, checks_of, target_of

xsake.register_backend("simple_kernel", "simple_kernel.backend")  # also where the package is not installed
TARGET = target_of("simple_kernel")


@pytest.mark.parametrize(
    "check", checks_of(TARGET, quick=os.environ.get("XSAKE_CHECKS") != "all"), ids=lambda check: check.title
)
def test_contract(check):
    assert_holds(TARGET, check)
