"""Text files to token files: a tokenizer, a training split and a held-out split in one new folder."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from xsake._ground import atomic
from xsake.model.data.progress import Place, Progress
from xsake.model.data.shards import SUFFIX, TOKENIZER_FILE, is_shard, token_dtype, write_shard
from xsake.model.data.tokenizer import END_OF_TEXT, check_vocab_size, fingerprint, load_tokenizer, train_tokenizer
from xsake.model.text.tokenizer_file import plain_tokenizer_errors

_TEXTS_AT_A_TIME = 64
_LOOK_UP_SECONDS = 0.1
_PIECE_CHARACTERS = 1 << 20  # a longer text is cut, so that more than one thread encodes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """The result of `build`: tokens and texts of each split, bytes of text read, and files that are not UTF-8."""

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
    if built := next((path for path in found if path.suffix == SUFFIX and is_shard(path)), None):
        raise ValueError(f"{built} is a file of tokens, not of text: give the texts that it was built from")
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

    Until the build is finished, its files lie in `out.part`. If the build is stopped, by Ctrl-C or by anything else,
    the same call goes on with the tokenizer and the token files in `out.part`, and the result is the same.

    Args:
      sources: text files, or folders of them. Each file is one text; the token `<|endoftext|>` stands after it.
      vocab_size: of the tokenizer that is trained.
      tokenizer: a tokenizer file to use instead of training one.
      holdout: the share of texts that go to the held-out split, by a hash of their contents: equal texts go together.
        Above 0, at least one text goes there, if the texts are not all equal.
      shard_tokens: tokens per token file.
      sample_bytes: the tokenizer is trained on about this much text, every n-th file.
    """
    if not 0 <= holdout < 1:
        raise ValueError(f"{holdout=} must be at least 0 and below 1")
    if shard_tokens < 1:
        raise ValueError(f"{shard_tokens=} must be at least 1")
    if out.exists():
        raise FileExistsError(f"{out} exists already; give a folder that does not, nothing was overwritten")
    paths = find_texts(sources)
    total = sum(path.stat().st_size for path in paths)
    own = None if tokenizer is None else load_tokenizer(tokenizer)
    if own is None:
        check_vocab_size(vocab_size)
    settings: dict[str, Any] = {"holdout": holdout, "shard_tokens": shard_tokens}
    settings |= {"vocab_size": vocab_size, "sample_bytes": sample_bytes} if own is None else {"own": fingerprint(own)}

    with Progress(out, paths, settings) as progress:
        saved = progress.folder / TOKENIZER_FILE
        if saved.exists():
            encoder = load_tokenizer(saved)
        else:
            sample = paths[:: max(1, -(-total // sample_bytes))]
            texts = (text for path in sample for text in _pieces(_text(path)[0]))
            encoder = own or _interruptible(lambda: train_tokenizer(texts, vocab_size))
            atomic.write_text(saved, encoder.to_str(pretty=True))
        encoder.encode_special_tokens = True  # <|endoftext|> inside a text is encoded as plain text
        about = {"vocab_size": encoder.get_vocab_size(), "tokenizer": fingerprint(encoder)}
        writers = {
            split: _Writer(progress.folder, split, shard_tokens, about, progress.places[split])
            for split in ("train", "held")
        }
        not_utf8, cut = 0, _cut(paths, holdout)
        for numbered in itertools.batched(enumerate(paths), _TEXTS_AT_A_TIME):
            waiting: list[tuple[_Writer, int, str]] = []
            for number, path in numbered:
                text, valid = _text(path)
                not_utf8 += not valid
                writer = writers["held" if _fraction(text) < cut else "train"]
                writer.texts += 1
                if writer.place.lacks(number):
                    waiting.append((writer, number, text))
            for (writer, number, _), tokens in zip(waiting, _encode(encoder, [w[2] for w in waiting]), strict=True):
                if writer.add(number, tokens):
                    progress.save({split: writer.place for split, writer in writers.items()})
        for writer in writers.values():
            writer.close()
        progress.finish()
    return Built(
        vocab_size=encoder.get_vocab_size(),
        tokens={split: writer.total for split, writer in writers.items()},
        texts={split: writer.texts for split, writer in writers.items()},
        bytes_read=total,
        not_utf8=not_utf8,
    )


class _Writer:
    """Tokens of one split, gathered until a file is full. `place` is what the finished files hold."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, about: dict[str, Any], place: Place):
        self.folder, self.split, self.shard_tokens, self.about, self.place = folder, split, shard_tokens, about, place
        self.dtype = token_dtype(about["vocab_size"])
        self.total, self.texts = place.files * shard_tokens, 0
        self.waiting: list[np.ndarray] = []

    def add(self, number: int, tokens: np.ndarray) -> bool:
        """Add the tokens of text `number` that the finished files lack. True if this finished a file."""
        tokens = self.place.rest_of(number, tokens).astype(self.dtype)
        self.total += tokens.size
        self.waiting.append(tokens)
        files = self.total // self.shard_tokens
        if files == self.place.files:
            return False
        self._write(files)
        self.place = Place(files=files, text=number, rest=self.total - files * self.shard_tokens)
        return True

    def close(self) -> None:
        """Write the remaining tokens to a last file."""
        self._write(-(-self.total // self.shard_tokens))

    def _write(self, files: int) -> None:
        """Write files until there are `files` in all."""
        rest = np.concatenate([np.zeros(0, self.dtype), *self.waiting])
        for file in range(self.place.files, files):
            path = self.folder / f"{self.split}-{file:05d}{SUFFIX}"
            path.unlink(missing_ok=True)  # of a build that was stopped before it saved its progress
            write_shard(path, rest[: self.shard_tokens], **self.about)
            rest = rest[self.shard_tokens :]
        self.waiting = [rest]


def _interruptible(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread, so that Ctrl-C stops the caller at once: the tokenizers library notices no Ctrl-C.

    The thread itself cannot be stopped, and goes on until it has finished or the process ends. The caller wakes now and
    then, since a signal need not interrupt a wait: the signal may come just before, or be given to another thread.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            with plain_tokenizer_errors("the tokenizer failed"):
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        wait([future], _LOOK_UP_SECONDS)
    return future.result()


def _encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[np.ndarray]:
    """Tokens of each text, with END_OF_TEXT at the end. The pieces of all texts are encoded together, on all cores."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [_pieces(text) for text in texts]
    flat = [piece for text in pieces for piece in text]
    encoded = iter(_interruptible(lambda: tokenizer.encode_batch_fast(flat, add_special_tokens=False)))
    for text in pieces:
        yield np.array([t for _ in text for t in next(encoded).ids] + [end], np.int64)


def _pieces(text: str) -> list[str]:
    """The text in pieces, cut only between lines, so that no word is cut."""
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


def _cut(paths: list[Path], holdout: float) -> float:
    """The texts whose `_fraction` is below this are held out: `holdout`, or more if no text is below that."""
    least, most = 1.0, 0.0
    for path in paths if holdout else ():
        fraction = _fraction(_text(path)[0])
        least, most = min(least, fraction), max(most, fraction)
        if least < holdout:
            return holdout
    return math.nextafter(least, 1) if least < most else 0.0


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest()) / 2**56
