"""qa_1 and qa_2: a question, and documents of which one (or two together) answer it.

RULER takes SQuAD and HotpotQA. The passages and questions here are our own, about well-known facts: 22 topics of two
passages; qa_1 asks about one of them, and qa_2 asks what only both together say. The other documents are the remaining
passages, and beyond these paragraphs of the essay.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.ruler.essay import Essay
from benchmarks.ruler.question import Draw, Question

_FILE = Path(__file__).parent / "data" / "questions.json"
_RULE = "Answer the question from the documents. Say only the answer, and no other words."


@cache
def topics() -> list[dict[str, Any]]:
    return json.loads(_FILE.read_text())


def documents_of(essay: Essay) -> int:
    return 2 * len(topics()) + len(essay.paragraphs)


@dataclasses.dataclass(frozen=True)
class Qa:
    hops: int

    def __call__(self, draw: Draw) -> Question:
        topic, asked = self._asked(draw.sample)
        needed = [_document(asked)] if self.hops == 1 else [_document(one) for one in topic["passages"]]
        near = [_document(one) for one in topic["passages"] if _document(one) not in needed]
        own = [_document(one) for other in topics() if other is not topic for one in other["passages"]]
        rng = draw.rng
        found = (needed + near + rng.sample(own, len(own)))[: draw.size]
        found += rng.sample(draw.essay.paragraphs, draw.size - len(found))
        rng.shuffle(found)
        context = "\n\n".join(f"Document {n}:\n{document}" for n, document in enumerate(found, 1))
        text = f"{_RULE}\n\nThese are the documents.\n\n{context}\n\n{_RULE}\n\nQuestion: {asked['ask']}"
        return Question(text, "Answer:", asked["answers"])

    def _asked(self, sample: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The topic, and what holds the question: one of its passages, or the topic itself."""
        if self.hops == 2:
            topic = topics()[sample % len(topics())]
            return topic, topic
        number = sample % (2 * len(topics()))
        topic = topics()[number % len(topics())]
        return topic, topic["passages"][number // len(topics())]


def _document(passage: dict[str, Any]) -> str:
    return f"{passage['title']}\n{passage['text']}"
