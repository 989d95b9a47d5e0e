"""BlockMask files: one .npz, plain arrays only, versioned, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import numpy as np

from xsake._ground import atomic
from xsake._ground.device import on_host
from xsake.hads.mask.lists.mask_lists import MaskLists

FORMAT, VERSION = "xsake.BlockMask", 3
_SINCE_3 = ("bitmaps", "kv_bitmap", "q_bitmap")  # a file of version 2 has none


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


def load(path: str | os.PathLike) -> MaskLists:
    try:
        with open(path, "rb") as file:
            arrays: dict[str, Any] = dict(_read(file))
        header = json.loads(str(arrays.pop("header")))
        version = header["format"], header["version"]
    except (EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a BlockMask file, or is damaged: {error}") from error
    if version not in ((FORMAT, VERSION), (FORMAT, 2)):
        raise ValueError(
            f"{path} has format {version[0]!r} version {version[1]!r}; this xsake reads {FORMAT!r} versions 2 and "
            f"{VERSION}"
        )
    static: dict[str, Any] = header["static"] | (dict.fromkeys(_SINCE_3) if version[1] == 2 else {})
    given, wanted = {*arrays, *static}, {field.name for field in dataclasses.fields(MaskLists)}
    if given != wanted:
        raise ValueError(
            f"{path} is not a BlockMask file, or is damaged: fields {sorted(given ^ wanted)} are missing or unknown"
        )
    if static["local_window_size"] is not None:
        static["local_window_size"] = tuple(static["local_window_size"])
    return MaskLists(**static, **arrays)


def _read(file: BinaryIO) -> Iterator[tuple[str, np.ndarray]]:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("it holds a single array")
    with archive:
        for name in archive.files:
            yield name, archive[name]
