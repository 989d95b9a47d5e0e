"""The documented name of `build`, which makes token files."""

from xsake.model.data.build import build

__all__ = ["build"]
