"""Sequences to calibrate and to evaluate on: from files of tokens, or from plain text with a tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from xsake.hads.calibration.calibrate import digest


@dataclasses.dataclass(frozen=True)
class Text:
    """One sequence. Where it asks something, `items[t]` is the number (from 1) of the item to whose answer the token
    after t belongs, and 0 elsewhere."""

    name: str
    domain: str
    tokens: np.ndarray  # i32[T]
    items: np.ndarray | None = None  # i32[T]

    @property
    def digest(self) -> str:
        return digest(self.tokens)


def load_texts(
    paths: Sequence[str | os.PathLike],
    *,
    length: int,
    limit: int | None = None,
    domains: Iterable[str] | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[Text]:
    """Sequences of exactly `length` tokens, at most `limit` per domain, none overlapping.

    A .npz file holds one array of tokens [N, T] per domain (longer sequences are cut at `length`) and, for domains
    that ask something, another with the suffix `.items`. Any other file is plain text, a domain of its own, cut into
    sequences by `encode`.
    """
    wanted = None if domains is None else set(domains)
    found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for path in map(Path, paths):
        if path.suffix == ".npz":
            found |= _arrays(path, length)
        elif encode is None:
            raise ValueError(f"{path} is plain text: it needs the model's tokenizer")
        else:
            ids = np.asarray(encode(path.read_text()), np.int32)
            found[path.stem] = ids[: len(ids) // length * length].reshape(-1, length), None
    if wanted is not None:
        if missing := sorted(wanted - set(found)):
            raise ValueError(f"no texts of {missing}; there are {', '.join(sorted(found))}")
        found = {name: value for name, value in found.items() if name in wanted}
    texts = [
        Text(f"{name}/{n}", name, tokens[n], None if items is None else items[n])
        for name, (tokens, items) in found.items()
        for n in range(len(tokens) if limit is None else min(limit, len(tokens)))
    ]
    if not texts:
        raise ValueError(f"no text has {length} tokens")
    return texts


def _arrays(path: Path, length: int) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    found = {}
    for name, tokens in arrays.items():
        if name.endswith(".items"):
            continue
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{path}: {name} must be tokens [N, T]; got {tokens.dtype}{tokens.shape}")
        items = arrays.get(f"{name}.items")
        if items is not None and items.shape != tokens.shape:
            raise ValueError(
                f"{path}: {name}.items must have the shape {tokens.shape} of its tokens, not {items.shape}"
            )
        if tokens.shape[1] < length:
            continue
        if items is not None and tokens.shape[1] > length:
            continue  # the questions are at the end
        found[name] = tokens[:, :length].astype(np.int32), None if items is None else items.astype(np.int32)
    return found
