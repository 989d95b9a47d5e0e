"""Text files to token files: a tokenizer, a training split and a held-out split in one new folder."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from xsake.model.data_shards import SUFFIX, token_dtype, write_shard
from xsake.model.data_tokenizer import END_OF_TEXT, fingerprint, load_tokenizer, train_tokenizer

TOKENIZER_FILE = "tokenizer.json"
_TEXTS_AT_A_TIME = 64
_PIECE_CHARACTERS = 1 << 20  # a text of one huge line would otherwise be encoded by one thread, slowly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """What `build` made: tokens and texts of each split, bytes of text read, and files that are not UTF-8."""

    vocab_size: int
    tokens: dict[str, int]
    texts: dict[str, int]
    bytes_read: int
    not_utf8: int


def find_texts(sources: Iterable[Path]) -> list[Path]:
    """Files as given, and every file below a folder, in the order of their names."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(path for path in source.rglob("*") if path.is_file())
        elif source.is_file():
            found.append(source)
        else:
            raise FileNotFoundError(f"{source} is neither a file nor a folder")
    if not found:
        raise ValueError("there is no file in what was given to build from")
    return found


def build(
    sources: Iterable[Path],
    out: Path,
    *,
    vocab_size: int = 16384,
    tokenizer: Path | None = None,
    holdout: float = 0.01,
    shard_tokens: int = 1 << 25,
    sample_bytes: int = 1 << 26,
) -> Built:
    """Make the folder `out` with `tokenizer.json`, `train-*.tokens` and `held-*.tokens`: whole, or not at all.

    Args:
      sources: text files, or folders of them. Each file is one text; the token `<|endoftext|>` stands after it.
      vocab_size: of the tokenizer that is trained, on every n-th text so that about `sample_bytes` are read.
      tokenizer: a tokenizer file to use instead of training one.
      holdout: the share of texts that go to the held-out split, by a hash of their contents: equal texts go together.
      shard_tokens: tokens in a file.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"{holdout=} must be at least 0 and below 1")
    if shard_tokens < 1:
        raise ValueError(f"{shard_tokens=} must be at least 1")
    if out.exists():
        raise FileExistsError(f"{out} exists already; give a folder that does not, nothing was overwritten")
    paths = find_texts(sources)
    total = sum(path.stat().st_size for path in paths)
    if tokenizer is not None:
        encoder = load_tokenizer(tokenizer)
    else:
        sample = paths[:: max(1, -(-total // sample_bytes))]
        encoder = train_tokenizer((text for path in sample for text in _pieces(_text(path)[0])), vocab_size)
    encoder.encode_special_tokens = True  # a text that mentions <|endoftext|> does not end there

    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    encoder.save(str(part / TOKENIZER_FILE))
    writers = {split: _Writer(part, split, encoder, shard_tokens) for split in ("train", "held")}
    not_utf8 = 0
    for group in itertools.batched(paths, _TEXTS_AT_A_TIME):
        texts = [_text(path) for path in group]
        not_utf8 += sum(not valid for _, valid in texts)
        for text, tokens in zip(texts, _encode(encoder, [text for text, _ in texts]), strict=True):
            writers["held" if _fraction(text[0]) < holdout else "train"].add(tokens)
    for writer in writers.values():
        writer.close()
    part.rename(out)
    return Built(
        vocab_size=encoder.get_vocab_size(),
        tokens={split: writer.total for split, writer in writers.items()},
        texts={split: writer.texts for split, writer in writers.items()},
        bytes_read=total,
        not_utf8=not_utf8,
    )


class _Writer:
    """Tokens of one split, gathered until a file is full."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, shard_tokens: int):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.about: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "tokenizer": fingerprint(tokenizer)}
        self.dtype = token_dtype(tokenizer.get_vocab_size())
        self.waiting: list[np.ndarray] = []
        self.files = self.total = self.texts = 0

    def add(self, tokens: np.ndarray) -> None:
        self.texts += 1
        self.total += tokens.size
        self.waiting.append(tokens.astype(self.dtype))
        if self.total >= (self.files + 1) * self.shard_tokens:
            self._write(whole_only=True)

    def close(self) -> None:
        self._write(whole_only=False)

    def _write(self, whole_only: bool) -> None:
        rest = np.concatenate([np.zeros(0, self.dtype), *self.waiting])
        while rest.size >= (self.shard_tokens if whole_only else 1):
            path = self.folder / f"{self.split}-{self.files:05d}{SUFFIX}"
            write_shard(path, rest[: self.shard_tokens], **self.about)
            rest = rest[self.shard_tokens :]
            self.files += 1
        self.waiting = [rest]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
    """Tokens of each text, its end included. The pieces of all texts are encoded together, on all cores."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [_pieces(text) for text in texts]
    encoded = iter(tokenizer.encode_batch_fast([p for text in pieces for p in text], add_special_tokens=False))
    for text in pieces:
        yield np.array([t for _ in text for t in next(encoded).ids] + [end], np.int64)


def _pieces(text: str) -> list[str]:
    """Cut before a line's first character, so that no word is cut."""
    if len(text) <= _PIECE_CHARACTERS:
        return [text]
    pieces, start = [], 0
    while start < len(text):
        cut = text.find("\n", start + _PIECE_CHARACTERS) + 1 or len(text)
        pieces.append(text[start:cut])
        start = cut
    return pieces


def _text(path: Path) -> tuple[str, bool]:
    """A file's text, and whether it was UTF-8; other bytes become replacement characters."""
    data = path.read_bytes()
    try:
        return data.decode(), True
    except UnicodeDecodeError:
        return data.decode(errors="replace"), False


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest()) / 2**56
