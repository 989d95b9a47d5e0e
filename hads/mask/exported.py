"""The static fields of a BlockMask as `jax.export` stores them beside a program: versioned JSON."""

from __future__ import annotations

import json
from typing import Any

from jax import export

FORMAT, VERSION = "xsake.BlockMask", 2


def register(mask: type, lists: tuple[str, ...], static: tuple[str, ...]) -> type:
    """Masks as arguments and results of exported programs; `lists` and `static` are the fields in their order."""

    def build(aux_data: Any, children: Any) -> Any:
        return mask(**dict(zip(lists + static, (*children, *aux_data), strict=True)))

    return export.register_pytree_node_serialization(
        mask,
        serialized_name=FORMAT,
        serialize_auxdata=lambda values: to_bytes(dict(zip(static, values, strict=True))),
        deserialize_auxdata=lambda stored: tuple(from_bytes(bytes(stored), static)[name] for name in static),
        from_children=build,
    )


def to_bytes(static: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, "static": static}).encode()


def from_bytes(stored: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        header = json.loads(stored)
        version, static = (header["format"], header["version"]), header["static"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the exported program's BlockMask is damaged: {error!r}") from error
    if version != (FORMAT, VERSION):
        raise ValueError(
            f"the exported program's BlockMask has format {version[0]!r} version {version[1]!r}; this xsake reads "
            f"{FORMAT!r} version {VERSION}: export the program again"
        )
    if {*static} != {*names}:
        raise ValueError(
            f"the exported program's BlockMask is damaged: fields {sorted({*static} ^ {*names})} are missing or unknown"
        )
    window = static["local_window_size"]
    return static | {"local_window_size": None if window is None else tuple(window)}
