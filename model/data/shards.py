"""Token files: one JSON line, padded to a page, then little-endian uint16 or uint32 tokens that are memory-mapped.

    {"format": "xsake-tokens", "version": 1, "dtype": "uint16", "tokens": 33554432, "vocab_size": 16384,
     "tokenizer": "6f0c..."}

The header says how long the file must be, so that a truncated file is refused instead of trained on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from xsake._ground import atomic
from xsake._ground.fields import check
from xsake._ground.kinds import TEXT, Kind, one_of, whole

FORMAT, VERSION = "xsake-tokens", 1
HEADER_BYTES = 4096
SUFFIX = ".tokens"
TOKENIZER_FILE = "tokenizer.json"  # beside the token files, and in the folder of a run
_HEADER: dict[str, Kind] = {
    "format": one_of(FORMAT),
    "version": whole(),
    "dtype": one_of("uint16", "uint32"),
    "tokens": whole(0, 2**62),
    "vocab_size": whole(1, 2**32),
    "tokenizer": TEXT,
}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every token of the vocabulary."""
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"{vocab_size=} must be between 1 and 2**32")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One open token file. `tokens` is a read-only memory map; `tokenizer` is the fingerprint of their tokenizer."""

    path: Path
    tokens: np.ndarray
    vocab_size: int
    tokenizer: str


def write_shard(path: Path, tokens: np.ndarray, *, vocab_size: int, tokenizer: str) -> None:
    """Write a token file: whole or not at all, never over an existing one."""
    if path.exists():
        raise FileExistsError(f"{path} exists already; it was not overwritten")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"tokens run from {tokens.min()} to {tokens.max()}, outside {vocab_size=}")
    dtype = token_dtype(vocab_size)
    header = {"format": FORMAT, "version": VERSION, "dtype": dtype.name, "tokens": int(tokens.size)}
    line = json.dumps(header | {"vocab_size": vocab_size, "tokenizer": tokenizer}).encode()
    with atomic.replacing(path) as file:
        file.write(line.ljust(HEADER_BYTES - 1) + b"\n")
        file.write(tokens.astype(dtype, copy=False).tobytes())


def is_shard(path: Path) -> bool:
    """Whether the file begins as a token file does."""
    with open(path, "rb") as file:
        return f'"format": "{FORMAT}"'.encode() in file.read(HEADER_BYTES)


def open_shard(path: Path) -> Shard:
    """Map a token file, after checking that it is one and that all of it is there."""
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    try:
        header = json.loads(head)
        for name, kind in _HEADER.items():
            check(name, header[name], kind)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no token file: its header was not understood ({error}). Build one with `xsake data build`"
        ) from error
    if header["version"] != VERSION:
        raise ValueError(
            f"{path} has version {header['version']} of the token format; this xsake reads version {VERSION}"
        )
    dtype, count = np.dtype(header["dtype"]).newbyteorder("<"), header["tokens"]
    expected, found = HEADER_BYTES + count * dtype.itemsize, path.stat().st_size
    if found != expected:
        raise ValueError(
            f"{path} is {'truncated' if found < expected else 'too long'}: its header promises {count} tokens "
            f"({expected} bytes), and it has {found} bytes. Build or copy it again"
        )
    tokens = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(count,)) if count else np.zeros(0, dtype)
    return Shard(path=path, tokens=tokens, vocab_size=header["vocab_size"], tokenizer=header["tokenizer"])


def open_shards(folder: Path, split: str) -> list[Shard]:
    """All token files of a split ("train", "held"), in the order of their names; they must be of one tokenizer."""
    paths = sorted(folder.glob(f"{split}-*{SUFFIX}"))
    if not paths:
        more = "" if split == "train" else ", from two texts or more and with a --holdout above 0"
        raise FileNotFoundError(f"{folder} has no {split}-*{SUFFIX} file. Build one with `xsake data build`{more}")
    shards = [open_shard(path) for path in paths]
    for shard in shards[1:]:
        if (shard.tokenizer, shard.vocab_size) != (shards[0].tokenizer, shards[0].vocab_size):
            raise ValueError(f"{shard.path} and {shards[0].path} are from different tokenizers: they cannot be mixed")
    return shards
