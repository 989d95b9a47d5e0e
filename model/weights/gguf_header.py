"""The header of a GGUF file: its fields, and where its tensors lie.

    magic, version, number of tensors, number of fields
    per field:  name, type, value          (text is a length and its bytes; a list is a type, a length and its items)
    per tensor: name, number of dimensions, dimensions (fastest first), type, offset into the data
    padding to general.alignment, then the data

Every length is compared with the bytes that are left before it is used, so that neither time nor memory grows beyond
the file's size. The `gguf` package's own reader does not compare, and takes seconds for a large vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4  # as in llama.cpp
_SCALARS: dict[GGUFValueType, np.dtype] = {
    kind: np.dtype(kind.name.lower()).newbyteorder("<")
    for kind in GGUFValueType
    if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """`shape` is numpy's, slowest first; `start` and `size` are bytes of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(data: np.ndarray) -> GGUFHeader:
    """The header of a file's bytes (uint8, best memory-mapped). ValueError says what is wrong with the header."""
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the magic")) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and versions {', '.join(map(str, _VERSIONS))} are read")
    tensor_count, field_count = cursor.number("<Q"), cursor.number("<Q")
    cursor.expect(field_count, 8 + 4 + 1, "fields")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text()
        _add(fields, name, cursor.value(cursor.number("<I"), name))
    cursor.expect(tensor_count, 8 + 4 + 8 + 4 + 8, "tensors")
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(tensor_count):
        _add(tensors, *cursor.tensor())
    alignment = fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} must be a power of two")
    start = -(-cursor.place // alignment) * alignment
    return GGUFHeader(fields=fields, tensors=_placed(tensors, start, len(data) - start))


def _placed(tensors: dict[str, GGUFTensor], start: int, size: int) -> dict[str, GGUFTensor]:
    for name, tensor in tensors.items():
        if tensor.start + tensor.size > size:
            raise ValueError(f"the data of tensor {name} end {tensor.start + tensor.size - size} bytes past the file")
    if (total := sum(tensor.size for tensor in tensors.values())) > size:
        raise ValueError(f"its tensors have {total} bytes in {max(size, 0)} bytes of data: they overlap")
    return {name: dataclasses.replace(tensor, start=start + tensor.start) for name, tensor in tensors.items()}


def _add(table: dict[str, Any], name: str, value: Any) -> None:
    if name in table:
        raise ValueError(f"it has {name} twice")
    table[name] = value


class _Cursor:
    """A place in the file, from which values are taken one after the other."""

    def __init__(self, data: np.ndarray):
        self._data, self.place = memoryview(data), 0

    def take(self, size: int, what: str) -> memoryview:
        start = self.place
        if size > len(self._data) - start:
            raise ValueError(f"it ends within {what}: {size} bytes at {start}, of {len(self._data)}")
        self.place += size
        return self._data[start : self.place]

    def expect(self, count: int, least: int, what: str) -> None:
        """Refuse `count` items of at least `least` bytes each if the rest of the file is too short for them."""
        if count * least > len(self._data) - self.place:
            raise ValueError(f"it promises {count} {what} in the {len(self._data) - self.place} bytes that are left")

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), "a number"))[0]

    def text(self) -> str:
        content = bytes(self.take(self.number("<Q"), "a text"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"a text at {self.place - len(content)} is not UTF-8: {error}") from error

    def value(self, kind: int, name: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._list(name)
        return self._scalars(kind, 1, name)[0]

    def _list(self, name: str) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind != GGUFValueType.STRING:
            return self._scalars(kind, count, name)
        self.expect(count, 8, f"texts in {name}")
        return [self.text() for _ in range(count)]

    def _scalars(self, kind: int, count: int, name: str) -> list[Any]:
        dtype = _known(lambda: _SCALARS[GGUFValueType(kind)], f"{name} has values of type {kind}")
        return np.frombuffer(self.take(count * dtype.itemsize, name), dtype).tolist()

    def tensor(self) -> tuple[str, GGUFTensor]:
        """(name, tensor), whose `start` still counts from the beginning of the data."""
        name, dimensions = self.text(), self.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions; from 1 to {_MOST_DIMENSIONS} are read")
        shape = tuple(reversed([self.number("<Q") for _ in range(dimensions)]))
        number, offset = self.number("<I"), self.number("<Q")
        kind = _known(lambda: GGMLQuantizationType(number), f"tensor {name} is of type {number}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"tensor {name} has shape {shape}, which {kind.name} cannot hold in blocks of {block}")
        return name, GGUFTensor(shape=shape, kind=kind, start=offset, size=math.prod(shape) // block * block_bytes)


def _known(look_up: Callable[[], Any], what: str) -> Any:
    try:
        return look_up()
    except (KeyError, ValueError) as error:
        raise ValueError(f"{what}, which is not known") from error
