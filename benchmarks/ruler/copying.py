"""Long copies: one of several marked passages is to be said again, word for word."""

from __future__ import annotations

from benchmarks.ruler import words
from benchmarks.ruler.noise import insert
from benchmarks.ruler.question import Draw, Question

PASSAGES = 8
GIVEN, ASKED = 8, 40  # words of a passage with which the answer begins, and that it is to go on with


def copy(draw: Draw) -> Question:
    rng, essay = draw.rng, draw.essay
    marks = [f"{adjective} {noun}" for adjective, noun in words.pairs(PASSAGES, rng)]
    starts = rng.sample(range(len(essay.sentences)), PASSAGES)
    # Quotation marks stand around passages alone.
    passages = [" ".join(essay.excerpt(start, GIVEN + ASKED)).replace('"', "'") for start in starts]
    sentences = essay.excerpt(rng.randrange(len(essay.sentences)), draw.size)
    places = sorted(rng.randrange(len(sentences) + 1) for _ in passages)
    marked = [f'\nThe {mark} passage: "{passage}"\n' for mark, passage in zip(marks, passages, strict=True)]
    asked = rng.randrange(PASSAGES)
    given, rest = (passages[asked].split(" ")[part] for part in (slice(GIVEN), slice(GIVEN, None)))
    text = (
        f"Some passages of the text below are marked. Remember them: one of them is to be repeated after the text.\n"
        f"{' '.join(insert(sentences, places, marked))}\nRepeat the {marks[asked]} passage, word for word."
    )
    depth = places[asked] / len(sentences)
    return Question(text, f'The {marks[asked]} passage: "{" ".join(given)}', [" ".join(rest)], depth)
