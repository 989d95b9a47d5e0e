"""Random English words, from lists of our own."""

from __future__ import annotations

import math
import random
import uuid
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parent / "data"


@cache
def of_kind(kind: str) -> tuple[str, ...]:
    """`nouns`, `adjectives` or `verbs`, in alphabetical order."""
    return tuple((_DATA / f"{kind}.txt").read_text().split())


@cache
def all_words() -> tuple[str, ...]:
    return tuple(sorted({word for kind in ("nouns", "adjectives", "verbs") for word in of_kind(kind)}))


def pairs(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """`count` different pairs of an adjective and a noun, from so few words that each pair shares both with others."""
    few = math.ceil(math.sqrt(count))
    adjectives, nouns = rng.sample(of_kind("adjectives"), few), rng.sample(of_kind("nouns"), few)
    return rng.sample([(adjective, noun) for adjective in adjectives for noun in nouns], count)


def draw(kind: str, rng: random.Random) -> str:
    """A key or a value of a needle: `words` gives an adjective and a noun, `numbers` seven digits, `uuids` a UUID."""
    if kind == "words":
        return f"{rng.choice(of_kind('adjectives'))}-{rng.choice(of_kind('nouns'))}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise ValueError(f"{kind=} must be words, numbers or uuids")
