"""The static fields of a BlockMask as `jax.export` stores them beside a program: versioned JSON."""

from __future__ import annotations

import json
from typing import Any

from jax import export

from xsake._ground import read
from xsake.hads.mask.lists.check import checked_static

FORMAT, VERSION = "xsake.BlockMask", 2


def register(mask: type, lists: tuple[str, ...], static: tuple[str, ...]) -> type:
    """Masks as arguments and results of exported programs; `lists` and `static` are the fields in their order."""

    def build(aux_data: Any, children: Any) -> Any:
        return mask(**dict(zip(lists + static, (*children, *aux_data), strict=True)))

    return export.register_pytree_node_serialization(
        mask,
        serialized_name=FORMAT,
        serialize_auxdata=lambda values: to_bytes(dict(zip(static, values, strict=True))),
        deserialize_auxdata=lambda stored: tuple(from_bytes(bytes(stored))[name] for name in static),
        from_children=build,
    )


def to_bytes(static: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, "static": static}).encode()


def from_bytes(stored: bytes) -> dict[str, Any]:
    what = "the exported program's BlockMask"
    header = read.parse_json(what, stored)
    read.check_version(what, header, FORMAT, (VERSION,), ": export the program again")
    try:
        return checked_static(read.check_table("static", header.get("static")))
    except ValueError as error:
        raise ValueError(f"{what} is damaged: {error}") from error
