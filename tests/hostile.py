"""How reading a hostile file must end: in one plain line, soon, and with little memory."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from xsake.model import load_pretrained, load_tokenizer, open_model

TEXT = f"Hi {'a' * 40}!"


def use(path: Path) -> None:
    """Everything that `xsake generate` does with a model's file before it writes the first token."""
    file = open_model(path)
    tokenizer = load_tokenizer(file)
    tokenizer.decode(tokenizer.encode(TEXT))
    if tokenizer.template is not None:
        tokenizer.chat([{"role": "user", "content": TEXT}])
    load_pretrained(file)


def assert_refused(path: Path, message: str) -> None:
    """A ValueError of one line is raised in little processor time, which a busy machine does not lengthen."""
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            use(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert type(caught.value) in (ValueError, FileNotFoundError), "of a library: no sentence for a person"
    said = str(caught.value)
    assert "\n" not in said and len(said) < 700, said
    assert time.process_time() - start < 2 and peak < 32 << 20, (time.process_time() - start, peak)
