"""vt: variables that are assigned from one another, scattered over noise; which of them have the first one's value?"""

from __future__ import annotations

import itertools
import random
import string

from benchmarks.ruler.noise import NOISE, insert
from benchmarks.ruler.question import Draw, Question

HOPS = 4
_EXAMPLE_LINES = 5  # of noise, in the example that goes before the question


def track(draw: Draw) -> Question:
    """One chain of five variables, after a short example that is solved."""
    example, lead, found = _chain(draw.rng, _EXAMPLE_LINES, letters=3)
    text, lead_asked, answers = _chain(draw.rng, draw.size, letters=5)
    return Question(f"{example}\n{lead} {' '.join(found)}\n\n{text}", lead_asked, answers)


def _chain(rng: random.Random, lines: int, *, letters: int) -> tuple[str, str, list[str]]:
    """(text with its question, how the answer begins, the variables)."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    variables, value = list(names), str(rng.randrange(10_000, 99_999))
    said = [f"VAR {variables[0]} = {value}"]
    said += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(variables)]
    context = "\n".join(insert([NOISE] * lines, sorted(rng.sample(range(lines), len(said))), said))
    text = (
        "The text below hides a chain of assignments of variables. Follow the chain and remember it.\n\n"
        f"{context}\nQuestion: Which variables have the value {value} in the text above? Find all of them."
    )
    lead = f"Answer: By the assignments in the text above, {len(variables)} variables have the value {value}. They are:"
    return text, lead, variables
