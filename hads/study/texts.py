"""Sequences to calibrate and to evaluate on: from files of tokens, or from plain text with a tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xsake._ground.read import read_arrays, read_text
from xsake.hads.profile.fingerprint import digest

_MOST_TEXT, _MOST_ARRAYS = 1 << 30, 1 << 34  # bytes of a file


@dataclasses.dataclass(frozen=True)
class Text:
    """One sequence. Where it asks something, `items[t]` is the number (from 1) of the item to whose answer the token
    after t belongs, and 0 elsewhere. `document` names where it comes from: sequences of one document are not
    independent. None: the sequence is all that is known of its document."""

    name: str
    domain: str
    tokens: np.ndarray  # i32[T]
    items: np.ndarray | None = None  # i32[T]
    document: str | None = None

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
    that ask something, another with the suffix `.items`; a third, `.documents`, may name the document of each
    sequence. Any other file is plain text, a domain and a document of its own, cut into sequences by `encode`.
    """
    wanted = None if domains is None else set(domains)
    found: dict[str, _Domain] = {}
    for path in map(Path, paths):
        if path.suffix == ".npz":
            found |= _arrays(path, length)
        elif encode is None:
            raise ValueError(f"{path} is plain text: it needs the model's tokenizer")
        else:
            ids = np.asarray(encode(read_text(path, _MOST_TEXT)), np.int32)
            cut = ids[: len(ids) // length * length].reshape(-1, length)
            found[path.stem] = _Domain(cut, documents=np.array([path.name] * len(cut)))
    if wanted is not None:
        if missing := sorted(wanted - set(found)):
            raise ValueError(f"no texts of {missing}; there are {', '.join(sorted(found))}")
        found = {name: value for name, value in found.items() if name in wanted}
    texts = [
        Text(
            f"{name}/{n}",
            name,
            of.tokens[n],
            None if of.items is None else of.items[n],
            None if of.documents is None else f"{name}/{of.documents[n]}",
        )
        for name, of in found.items()
        for n in range(len(of.tokens) if limit is None else min(limit, len(of.tokens)))
    ]
    if not texts:
        raise ValueError(f"no text has {length} tokens")
    return texts


class _Domain(NamedTuple):
    tokens: np.ndarray  # i32[N, T]
    items: np.ndarray | None = None  # i32[N, T]
    documents: np.ndarray | None = None  # str[N]


def _arrays(path: Path, length: int) -> dict[str, _Domain]:
    arrays = read_arrays(path, _MOST_ARRAYS)
    found = {}
    for name, tokens in arrays.items():
        if name.endswith((".items", ".documents")):
            continue
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{path}: {name} must be tokens [N, T]; got {tokens.dtype}{tokens.shape}")
        items = arrays.get(f"{name}.items")
        if items is not None and items.shape != tokens.shape:
            raise ValueError(
                f"{path}: {name}.items must have the shape {tokens.shape} of its tokens, not {items.shape}"
            )
        documents = arrays.get(f"{name}.documents")
        if documents is not None and (documents.shape != tokens.shape[:1] or documents.dtype.kind != "U"):
            raise ValueError(
                f"{path}: {name}.documents must be {len(tokens)} names; got {documents.dtype}{documents.shape}"
            )
        if tokens.shape[1] < length:
            continue
        if items is not None and tokens.shape[1] > length:
            continue  # the questions are at the end
        items = None if items is None else items.astype(np.int32)
        found[name] = _Domain(tokens[:, :length].astype(np.int32), items, documents)
    return found
