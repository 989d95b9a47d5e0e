"""Questions whose answer stands far back in the text: needles, pairs and copies, put into filler of real tokens.

Each is asked at the end of the text and, in another text, at MIDDLE of it, where filler follows: a method may treat the
last rows of a sequence as special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xsake.hads.study.texts import Text

MIDDLE = 5 / 8  # of the text: where the questions of a "_middle" task end
AT_END = ("copy", "pairs", "needles")
NAMES = (*AT_END, *(f"{name}_middle" for name in AT_END))
_THINGS = ("river", "castle", "garden", "engine", "mirror", "island", "ticket", "bridge", "candle", "forest")


def make(fillers: Sequence[np.ndarray], encode: Callable[[str], list[int]], seed: int = 0) -> list[Text]:
    """One text per task and filler; the domain of a text is the name of its task."""
    rng = np.random.default_rng(seed)
    makers: dict[str, Callable[..., tuple]] = {"copy": copy, "pairs": pairs, "needles": partial(needles, encode=encode)}

    def one(name: str, filler: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        end = round(len(filler) * MIDDLE) if name.endswith("_middle") else len(filler)
        return makers[name.removesuffix("_middle")](np.asarray(filler, np.int32), rng, end=end)

    return [Text(f"{name}/{n}", name, *one(name, filler)) for name in NAMES for n, filler in enumerate(fillers)]


def copy(
    filler: np.ndarray, rng: np.random.Generator, *, span: int = 64, end: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A random span of tokens early in the text, and again before token `end`: each token of the second span, but for
    its first eight, is an item. Returns (tokens, items), as long as the filler."""
    tokens, items, length = _blank(filler, end)
    if length < 4 * span:
        raise ValueError(f"{length} tokens are too few for two spans of {span}")
    drawn = rng.choice(np.unique(filler), span, replace=False)
    at = int(rng.integers(span, length - 3 * span))
    tokens[at : at + span] = tokens[length - span : length] = drawn
    items[length - span + 7 : length - 1] = np.arange(1, span - 7)  # an item stands at the token before its answer
    return tokens, items


def pairs(
    filler: np.ndarray, rng: np.random.Generator, *, count: int = 16, end: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Associative recall: `count` pairs of tokens, strewn over the text and repeated before token `end` in another
    order, where the first token of a pair asks for the second. Each pair is an item. The filler uses no token of a
    pair."""
    tokens, items, length = _blank(filler, end)
    if length < 16 * count:
        raise ValueError(f"{length} tokens are too few for {count} pairs")
    rare = _unused(filler, 2 * count, rng)
    keys, values = rare[:count], rare[count:]
    places = np.sort(rng.choice((length - 4 * count) // 2, count, replace=False)) * 2
    tokens[places], tokens[places + 1] = keys, values
    for item, n in enumerate(rng.permutation(count), 1):
        at = length - 2 * count + 2 * (item - 1)
        tokens[at], tokens[at + 1] = keys[n], values[n]
        items[at] = item
    return tokens, items


def needles(
    filler: np.ndarray,
    rng: np.random.Generator,
    encode: Callable[[str], list[int]],
    *,
    count: int = 4,
    end: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sentences with numbers of eight digits at even depths, asked for before token `end`. Each number is an item."""
    things = rng.choice(_THINGS, count, replace=False)
    said = [
        (f"\nThe magic number of the {thing} is", " " + "".join(rng.choice(list("0123456789"), 8)), ".\n")
        for thing in things
    ]
    encoded = [tuple(np.asarray(encode(part), np.int32) for part in one) for one in said]
    asked = sum(len(part) for one in encoded for part in one)
    tokens, items, length = _blank(filler, end)
    if length < 4 * asked:
        raise ValueError(f"{length} tokens are too few for {count} needles of {asked} tokens")
    for n, parts in enumerate(encoded):
        sentence = np.concatenate(parts)
        at = (n * (length - 2 * asked)) // count + asked // count
        tokens[at : at + len(sentence)] = sentence
    at = length - asked
    for item, n in enumerate(rng.permutation(count), 1):
        question, answer, _ = encoded[n]
        sentence = np.concatenate(encoded[n])
        tokens[at : at + len(sentence)] = sentence
        first = at + len(question)
        items[first - 1 : first - 1 + len(answer)] = item
        at += len(sentence)
    return tokens, items


def _blank(filler: np.ndarray, end: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """(a copy of the filler, no items, the token before which the questions end)."""
    if end is not None and not 0 < end <= len(filler):
        raise ValueError(f"{end=} must be from 1 to {len(filler)}, the tokens of the filler")
    return filler.copy(), np.zeros(len(filler), np.int32), len(filler) if end is None else end


def _unused(filler: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` tokens below the filler's largest token that the filler does not hold."""
    free = np.setdiff1d(np.arange(int(filler.max())), filler)
    if len(free) < count:
        raise ValueError(f"the filler leaves only {len(free)} tokens unused; {count} are needed")
    return rng.choice(free, count, replace=False).astype(np.int32)
