"""From a task to the tokens of a prompt: the model's chat template around the question, filled up to a length."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from benchmarks.ruler.essay import Essay
from benchmarks.ruler.fit import largest
from benchmarks.ruler.question import Draw, Question, Task
from benchmarks.ruler.tasks import BEYOND, NEEDLE, NEEDLE_DEPTHS, TASKS, needle_at

_MARK = "THE-QUESTION-STANDS-HERE"
_FILLED = 0.85  # of the tokens: with less, a haystack has ended before the prompt was full


@dataclasses.dataclass(frozen=True)
class Frame:
    """The text before and after the user's words. The answer's beginning follows at once."""

    before: str
    after: str
    encode: Callable[[str], Sequence[int]]

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """The chat template is run once, since it runs in a process of its own."""
        if tokenizer.template is None:
            return cls("", " ", tokenizer.encode)
        text = tokenizer.chat_text([{"role": "user", "content": _MARK}])
        if text.count(_MARK) != 1:
            raise ValueError("the model's chat template does not say the user's words once")
        before, after = text.split(_MARK)
        return cls(before, after, tokenizer.encode_chat_text)

    def tokens(self, question: Question) -> Sequence[int]:
        return self.encode(self.before + question.text + self.after + question.lead)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and how it is scored. `name` tells it from all other samples of a run."""

    name: str
    task: str
    length: int
    tokens: Sequence[int]
    answers: Sequence[str]
    answer_tokens: int
    score: Callable[[str, Sequence[str]], float]
    depth: float | None


def make(name: str, task: Task, *, length: int, sample: int, seed: int, frame: Frame, essay: Essay) -> Sample:
    """A prompt of at most `length` tokens with its answer, with as much haystack as fits.

    The same arguments give the same prompt. Raises ValueError if the task does not fit, or runs out of haystack.
    """

    def question(size: int) -> Question:
        # Every size draws anew from the same seed, so that the needles are those of the final prompt.
        rng = random.Random(f"{seed}/{name}/{length}/{sample}")
        return task.make(Draw(rng, size, length, sample, essay))

    limit, most = length - task.answer_tokens, task.most(essay)
    try:
        size = largest(lambda size: len(frame.tokens(question(size))), limit, least=task.least, most=most)
    except ValueError as error:
        raise ValueError(
            f"{name} does not fit {length} tokens with {task.answer_tokens} for its answer: {error}"
        ) from error
    asked = question(size)
    tokens = frame.tokens(asked)
    if size == most and len(tokens) < _FILLED * limit:
        raise ValueError(f"{name} has haystack for {len(tokens)} tokens only, not for {length}: use a shorter length")
    return Sample(
        name=f"{name}/{length}/{sample}",
        task=name.split("@")[0],
        length=length,
        tokens=tokens,
        answers=list(asked.answers),
        answer_tokens=task.answer_tokens,
        score=task.score,
        depth=asked.depth,
    )


@dataclasses.dataclass(frozen=True)
class Made:
    """Prompts that are made as they are needed, by the model's tokenizer."""

    tokenizer: Any
    essay: Essay
    seed: int = 0

    @cached_property
    def frame(self) -> Frame:
        return Frame.of(self.tokenizer)

    @property
    def stop(self) -> frozenset[int]:
        return self.tokenizer.stop

    def check(self, tasks: Mapping[str, Task], lengths: Sequence[int], samples: int) -> None:
        """Raise ValueError if a task does not fit the shortest length."""
        for name, task in tasks.items():
            self.sample(name, task, min(lengths), 0)

    def sample(self, name: str, task: Task, length: int, number: int) -> Sample:
        material: dict[str, Any] = dict(seed=self.seed, frame=self.frame, essay=self.essay)
        return make(name, task, length=length, sample=number, **material)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(tokens)


def tasks_named(names: Sequence[str]) -> dict[str, Task]:
    """Tasks by name; "all" is the thirteen, "beyond" what RULER does not ask, and "needle" the needle at each of its
    depths."""
    found: dict[str, Task] = {}
    for name in names:
        if name == "all":
            found |= TASKS
        elif name == "beyond":
            found |= BEYOND
        elif name == NEEDLE:
            found |= {f"{NEEDLE}@{depth}": needle_at(depth) for depth in NEEDLE_DEPTHS}
        elif name in TASKS | BEYOND:
            found[name] = (TASKS | BEYOND)[name]
        else:
            raise ValueError(f"unknown task {name!r}; there are all, beyond, {NEEDLE}, {', '.join(TASKS | BEYOND)}")
    return found
