"""Needles in a haystack: sentences that give a key a value, and a question for the values of some keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from benchmarks.ruler import words
from benchmarks.ruler.noise import NOISE, insert
from benchmarks.ruler.question import Draw, Question

DEPTHS = tuple(round(100 * n / 39) for n in range(40))  # in percent of the sentences, where needles may stand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Niah:
    """`keys` keys with `values` values each, of which `asked` keys are asked for.

    Keys of the kind `pairs` are near copies of each other: each word of a key stands in other keys, too.

    The haystack is noise (a line that repeats), an essay, or needles of other keys. The excerpt of the essay begins at
    a random sentence (RULER's begin at the first one), so that samples differ in more than their needles. `depth`, in
    percent, puts a needle at one place.
    """

    haystack: str = "essay"
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1
    depth: int | None = None

    def __call__(self, draw: Draw) -> Question:
        rng = draw.rng
        keys = _different(self.key, self.keys, draw)
        values = {key: _different(self.value, self.values, draw) for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.asked)
        answers = [value for key in asked for value in values[key]]
        context, places = self._context(needles, keys, draw)
        names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        one = len(answers) == 1
        kind, are, them = (self.value[:-1], "is", "it") if one else (self.value, "are", "them")
        which = f"secret {kind} of {names} in the text above"
        text = (
            f"{'A' if one else 'Some'} secret {kind} {are} hidden in the text below. Remember {them}: a question about "
            f"{them} follows after the text.\n{context}\n"
            f"What {are} the {which}?"
        )
        return Question(text, f"The {which} {are}", answers, places[0] if len(needles) == 1 else None)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the secret {self.value} of {key} is: {value}."

    def _context(self, needles: Sequence[str], keys: Sequence[str], draw: Draw) -> tuple[str, list[float]]:
        """The haystack with its needles, and the depth of each needle."""
        rng, size = draw.rng, draw.size
        if self.haystack == "essay":
            depths = sorted(rng.sample(DEPTHS, len(needles))) if self.depth is None else [self.depth] * len(needles)
            sentences = draw.essay.excerpt(rng.randrange(len(draw.essay.sentences)), size)
            places = [int(len(sentences) * depth / 100) for depth in depths]
            return " ".join(insert(sentences, places, needles)), [place / len(sentences) for place in places]
        if self.depth is not None:
            raise ValueError(f"a depth is for a haystack of essays, not of {self.haystack}")
        places = sorted(rng.sample(range(size), len(needles)))
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            others = (words.draw(self.key, rng) for _ in range(2 * size + 100))
            others = itertools.islice((key for key in others if key not in keys), size)
            lines = [self._needle(key, words.draw(self.value, rng)) for key in others]
        return "\n".join(insert(lines, places, needles)), [place / size for place in places]


def _different(kind: str, count: int, draw: Draw) -> list[str]:
    if kind == "pairs":
        return [" ".join(pair) for pair in words.pairs(count, draw.rng)]
    found: dict[str, None] = {}
    while len(found) < count:
        found[words.draw(kind, draw.rng)] = None
    return list(found)
