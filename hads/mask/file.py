"""BlockMask files: one .npz, plain arrays only, versioned, written atomically, checked when they are read."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import jax
import numpy as np

from xsake._ground import atomic, read
from xsake._ground.device import on_host
from xsake.hads.mask.lists.check import check, checked_static
from xsake.hads.mask.lists.mask_lists import BITMAPS, COLUMNS, ROWS, MaskLists

FORMAT, VERSION = "xsake.BlockMask", 3  # a file of version 2 has no bitmaps
MOST_BYTES = 1 << 28


def save(mask: MaskLists, path: str | os.PathLike) -> None:
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        if isinstance(value, jax.core.Tracer):
            raise TypeError("a traced BlockMask cannot be saved: save it outside jit")
        if hasattr(value, "shape"):
            arrays[field.name] = on_host(value)
        else:
            static[field.name] = value
    header = json.dumps({"format": FORMAT, "version": VERSION, "static": static})
    with atomic.replacing(path) as file:
        np.savez_compressed(file, header=np.array(header), **arrays)


def load(path: str | os.PathLike, most_bytes: int = MOST_BYTES) -> MaskLists:
    name = os.fspath(path)
    arrays = read.read_arrays(path, most_bytes)
    header = read.parse_json(f"the header of {name}", str(arrays.pop("header", "")))
    version = read.check_version(name, header, FORMAT, (2, VERSION))
    try:
        static = read.check_table("static", header.get("static"))
        # An array that the mask lacks is None among the static fields.
        stored = (dict.fromkeys(BITMAPS) if version == 2 else {}) | static | arrays
        lists = {field: stored.pop(field) for field in ROWS + COLUMNS + BITMAPS if field in stored}
        mask = MaskLists(**checked_static(stored), **read.check_names(lists, ROWS + COLUMNS + BITMAPS))
        check(mask)
    except ValueError as error:
        raise ValueError(f"{name} is not a BlockMask file, or is damaged: {read.reason(error)}") from error
    return mask
