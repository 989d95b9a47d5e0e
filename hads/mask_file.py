"""BlockMask files: one .npz, plain arrays only, versioned, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.hads.block_mask import BlockMask

VERSION = 1


def save(mask: BlockMask, path: str | os.PathLike) -> None:
    arrays: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for field in dataclasses.fields(mask):
        value = getattr(mask, field.name)
        if isinstance(value, jax.core.Tracer):
            raise TypeError("a traced BlockMask cannot be saved: save it outside jit")
        if hasattr(value, "shape"):
            arrays[field.name] = np.asarray(value)
        else:
            static[field.name] = value
    header = json.dumps({"format": "xsake.BlockMask", "version": VERSION, "static": static})
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, header=np.array(header), **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike) -> BlockMask:
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in file.files if name != "header"}
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a BlockMask file, or is damaged: {error}") from error
    if header.get("format") != "xsake.BlockMask" or header.get("version") != VERSION:
        raise ValueError(
            f"{path} has format {header.get('format')!r} version {header.get('version')!r}; "
            f"this xsake reads 'xsake.BlockMask' version {VERSION}"
        )
    static: dict[str, Any] = header["static"]
    if static["local_window_size"] is not None:
        static["local_window_size"] = tuple(static["local_window_size"])
    lists: dict[str, Any] = {name: jnp.asarray(value) for name, value in arrays.items()}
    return BlockMask(**static, **lists)
