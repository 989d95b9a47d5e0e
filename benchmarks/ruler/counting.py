"""cwe and fwe: which words occur most often?"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence

from benchmarks.ruler import words
from benchmarks.ruler.question import Draw, Question

COMMON = 10  # words to be found by cwe
SHORT = 4096  # below this many tokens, cwe's words occur less often
ALPHA = 2.0  # fwe: the word of rank k occurs in proportion to k ** -ALPHA
LETTERS = 6  # of a coded word
FREQUENT_TOKENS = 50  # for the answer of fwe


def common_words(draw: Draw) -> Question:
    """cwe: a numbered list of `size` words, ten of them 30 times and the others 3 times; after an example, solved."""
    is_short = draw.length < SHORT
    often, seldom = (6, 1) if is_short else (30, 3)
    example, example_common = _list(draw.rng, *((20, 3, 1) if is_short else (40, 10, 3)))
    listed, common = _list(draw.rng, draw.size, often, seldom)
    lead = f"Answer: The {COMMON} words that occur most often in the list above are:"
    solved = " ".join(f"{n}. {word}" for n, word in enumerate(example_common, 1))
    return Question(f"{_ask_common(example)}\n{lead} {solved}\n{_ask_common(listed)}", lead, common)


def _ask_common(listed: str) -> str:
    return (
        "A numbered list of words follows. Some of the words occur more often than others. Remember those that occur "
        f"most often.\n{listed}\nQuestion: Which {COMMON} words occur most often in the list above?"
    )


def _list(rng: random.Random, different: int, often: int, seldom: int) -> tuple[str, list[str]]:
    drawn = rng.sample(words.all_words(), different)
    common = drawn[:COMMON]
    every = common * often + drawn[COMMON:] * seldom
    rng.shuffle(every)
    return " ".join(f"{n}. {word}" for n, word in enumerate(every, 1)), common


def frequent_words(draw: Draw) -> Question:
    """fwe: about `size` coded words, whose frequencies fall with the square of their rank; dots have the first rank,
    and the three words after them are asked for."""
    vocabulary = coded_vocabulary(draw.rng, max((draw.length - FREQUENT_TOKENS) // 50, 8))
    counts = zeta_counts(len(vocabulary), draw.size)
    every = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    draw.rng.shuffle(every)
    text = (
        "Read the coded text below and count how often each coded word occurs. Find the three coded words that occur "
        f"most often. {' '.join(every)}\nQuestion: Which three coded words occur most often in the text above? Leave "
        "out the dots '...', and explain nothing."
    )
    lead = "Answer: The three coded words that occur most often in the text above are:"
    return Question(text, lead, vocabulary[1:4])


def coded_vocabulary(rng: random.Random, count: int) -> Sequence[str]:
    """Different coded words by rank; the first is dots, which count as noise."""
    found: dict[str, None] = {"...": None}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(found)


def zeta_counts(ranks: int, total: int) -> list[int]:
    """How often each rank occurs, rounded down; over infinitely many ranks the sum would be `total`."""
    zeta = math.pi**2 / 6  # of ALPHA = 2
    return [int(total * rank**-ALPHA / zeta) for rank in range(1, ranks + 1)]
