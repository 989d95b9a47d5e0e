"""The documented name of `make_mesh`."""

from xsake.model.network.sharding import make_mesh

__all__ = ["make_mesh"]
