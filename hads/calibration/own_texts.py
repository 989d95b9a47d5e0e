"""Texts to calibrate on that come with xsake: prose, verse, code, and questions whose answers stand far back.

`chronicle.txt` is the beginning of the World English Bible, `play.txt` that of Shakespeare's The Tempest; both are in
the public domain. Code is xsake's own. In every second sequence sentences state numbers, and its end asks for them, so
that heads which carry an answer over a long way are seen doing it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from importlib import resources

import numpy as np
from jaxtyping import Int

_THINGS = ("lighthouse", "violin", "harbour", "orchard", "compass", "kettle", "viaduct", "meadow", "lantern", "archive")
_CODE = (*(f"hads/{name}" for name in ("selection", "calibration", "profile", "mask", "study")), "model/network", "_op")
_NEEDLES = 4


def own_texts(
    encode: Callable[[str], list[int]], *, length: int, count: int = 8, seed: int = 0
) -> Int[np.ndarray, "count length"]:
    """`count` sequences of `length` tokens, no two of which have the same text where there is enough of it.

    Prose and verse are followed by code where a sequence is longer than they are: a text that was repeated inside a
    sequence would be read off from its first copy.
    """
    rng = np.random.default_rng(seed)
    written = _prose("chronicle"), "", _prose("play")
    sources = itertools.cycle([_tokens(encode, text + _code(n, len(written))) for n, text in enumerate(written)])
    found = []
    for number, source in zip(range(count), sources, strict=False):
        text = np.fromiter(itertools.islice(source, length), np.int32, length)
        found.append(text if number % 2 else _asking(text, rng, encode))
    return np.stack(found)


def _prose(name: str) -> str:
    return (resources.files(__package__) / "shipped" / f"{name}.txt").read_text()


def _code(part: int, parts: int) -> str:
    """Every `parts`-th file of the package's code, from number `part` on."""
    root = resources.files("xsake")
    files = [file for folder in _CODE for file in root.joinpath(folder).iterdir() if file.name.endswith(".py")]
    return "\n\n".join(file.read_text() for file in sorted(files, key=lambda file: file.name)[part::parts])


def _tokens(encode: Callable[[str], list[int]], text: str) -> Iterator[int]:
    """The text's tokens, over and over; it is encoded when the first one is asked for."""
    yield from itertools.cycle(encode(text))


def _asking(text: np.ndarray, rng: np.random.Generator, encode: Callable[[str], list[int]]) -> np.ndarray:
    """The text with sentences that state numbers at even depths; its end asks for all of them, and answers. They take
    a quarter of the text at most."""
    things = rng.choice(_THINGS, _NEEDLES, replace=False)
    sentences = [f"\nThe number of the {thing} is {rng.integers(10**5, 10**6)}.\n" for thing in things]
    stated = [np.asarray(encode(sentence), np.int32) for sentence in sentences]
    while stated and 4 * sum(map(len, stated)) > len(text):
        stated.pop()
    if not stated:
        return text
    end = np.concatenate([stated[n] for n in rng.permutation(len(stated))])
    text = text.copy()
    for n, tokens in enumerate(stated):
        at = (n * (len(text) - 2 * len(end)) + len(end)) // len(stated)
        text[at : at + len(tokens)] = tokens
    text[-len(end) :] = end
    return text
