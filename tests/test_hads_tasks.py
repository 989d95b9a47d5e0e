"""The study's tasks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.hads import tasks


def encode(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_tasks_ask_for_what_stands_before():
    rng = np.random.default_rng(1)
    filler = rng.integers(0, 400, 1000).astype(np.int32) * 2
    tokens, items = tasks.copy(filler, rng, span=32)
    end = tokens[-32:].tolist()
    places = [n for n in range(900) if tokens[n : n + 32].tolist() == end]
    assert len(places) == 1 and (items > 0).sum() == 24 and items[-32:].tolist() == [0] * 7 + [*range(1, 25), 0]

    tokens, items = tasks.pairs(filler, rng, count=8)
    asked = np.flatnonzero(items)
    assert items[asked].tolist() == list(range(1, 9))
    for at in asked:
        (first, second) = np.flatnonzero(tokens == tokens[at])
        assert second == at and tokens[first + 1] == tokens[at + 1] and first < len(tokens) // 2 + 500

    tokens, items = tasks.needles(np.resize(filler, 4000), rng, encode, count=2)
    text = bytes(max(token - 3, 0) % 256 for token in tokens).decode("latin-1")
    for item in (1, 2):
        answer = bytes((tokens[np.flatnonzero(items == item) + 1] - 3).tolist()).decode()
        assert len(answer) == 9 and answer[1:].isdigit() and text.count(f"{answer}.") == 2

    made = tasks.make([np.resize(filler, 4000)] * 2, encode)
    assert [text.name for text in made] == [f"{name}/{n}" for name in tasks.NAMES for n in (0, 1)]
    assert [int(text.items.max()) for text in made] == [56, 56, 16, 16, 4, 4] * 2
    for text in made:  # asked at the end, or at 5/8 of the text, with the filler after it
        last = int(np.flatnonzero(text.items)[-1])
        end = 2500 if text.domain.endswith("_middle") else 4000
        assert end - 20 < last < end and len(text.tokens) == 4000
        assert (text.tokens[end:] == np.resize(filler, 4000)[end:]).all()
    with pytest.raises(ValueError, match="end=0 must be from 1 to 1000"):
        tasks.copy(filler, rng, end=0)

    for task, least in ((tasks.copy, "spans"), (tasks.pairs, "pairs")):
        with pytest.raises(ValueError, match=f"100 tokens are too few for .*{least}"):
            task(filler[:100], rng)
