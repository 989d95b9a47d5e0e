"""tokenizer.json files, read with the `tokenizers` library and checked: they come with models from anywhere."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_MOST_BYTES = 1 << 28
_MOST_GROWTH = 1024  # of a text by replacements: thirty doublings would fill any memory


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, set to neither cut nor pad texts. ValueError if the file holds no usable tokenizer."""
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer {path} does not exist")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is no tokenizer file: it has more than {_MOST_BYTES} bytes")
    with plain_tokenizer_errors(f"{path} is no tokenizer file"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > _MOST_GROWTH:
            raise ValueError(f"{path}: its replacements may make a text more than {_MOST_GROWTH} times as long")
    return tokenizer


@contextlib.contextmanager
def plain_tokenizer_errors(what: str) -> Iterator[None]:
    """Raise ValueError instead of the library's `Exception`, or of a panic in its Rust code (a BaseException)."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{what}: {reason[:500]}") from error


def _growth(part: dict[str, Any]) -> int | float:
    """The largest factor by which a normalizer or decoder, given as its JSON, lengthens a text."""
    if part["type"] == "Sequence":
        return math.prod(_growth(each) for each in part.get("normalizers") or part.get("decoders") or [])
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] != "Replace":
        return 1
    if pattern := part["pattern"].get("String"):
        return max(1, len(part["content"]) / len(pattern))
    return 1 + len(part["content"])  # of a regular expression, which may match between any two characters
