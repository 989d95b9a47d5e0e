"""The haystack: prose from which needles stick out."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from functools import cached_property
from pathlib import Path

_LEAST_WORDS = 12  # shorter paragraphs are headings and remarks


@dataclasses.dataclass(frozen=True)
class Essay:
    """Paragraphs of prose, each on one line."""

    paragraphs: tuple[str, ...]

    @classmethod
    def of_text(cls, text: str) -> Essay:
        """The paragraphs of a text that are prose: they begin as a sentence does, and end as one."""
        found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
        prose = dict.fromkeys(part for part in found if _is_prose(part))
        if not prose:
            raise ValueError("the text has no paragraph of prose: paragraphs need empty lines between them")
        return cls(tuple(prose))

    @classmethod
    def python_reference(cls) -> Essay:
        """The prose of Python's language reference, which comes with Python: nothing has to be fetched or shipped.

        Other versions of Python have other prompts; `digest` tells them apart.
        """
        from pydoc_data.topics import topics

        return cls.of_text("\n\n".join(topics[name] for name in sorted(topics)))

    @classmethod
    def read(cls, path: Path) -> Essay:
        return cls.of_text(path.read_text())

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.paragraphs).encode()).hexdigest()[:16]

    @cached_property
    def sentences(self) -> tuple[tuple[str, ...], ...]:
        """The words of each sentence."""
        cut = (re.split(r"(?<=[.!?]) +(?=[A-Z])", paragraph) for paragraph in self.paragraphs)
        return tuple(tuple(sentence.split(" ")) for part in cut for sentence in part)

    def excerpt(self, start: int, words: int) -> list[str]:
        """`words` words from a sentence on, as sentences of which the last may be cut; the text repeats if need be."""
        found = []
        while words > 0:
            sentence = self.sentences[start % len(self.sentences)][:words]
            found.append(" ".join(sentence))
            words, start = words - len(sentence), start + 1
        return found


def _is_prose(paragraph: str) -> bool:
    is_sentence = bool(re.match(r"[A-Z]\w* ", paragraph)) and paragraph[-1] in ".!?"
    return is_sentence and paragraph.count(" ") >= _LEAST_WORDS - 1 and not re.search(r"::=|>>>|\s\|\s", paragraph)
