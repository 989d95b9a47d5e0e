"""A study's methods on the texts that all of them have read, from its records: there means can be compared."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.hads.methods import RIVALS, STRENGTHENED
from benchmarks.hads.summaries import recorded
from xsake.hads.study.summary import as_json, summarise


class Lower(NamedTuple):
    """In how many comparisons with a rival, of one text at one budget, HADS's KL is the lower one."""

    count: int
    of: int


class Shared(NamedTuple):
    """`rows` are a summary's, of the shared texts and of the budgets that every method has."""

    texts: int
    budgets: list[float]
    rows: list[dict[str, Any]]
    lower: Lower  # of the rows
    lower_everywhere: Lower  # of all texts and budgets


def shared(which: str) -> Shared | None:
    """Of the recorded study of this name; None if HADS has read no other texts than these."""
    _, lines = recorded(which)
    lines = [line for line in lines if line["layers"] == "profile" and "asked" not in line]
    methods = {line["method"] for line in lines}
    texts = set.intersection(*({line["sequence"] for line in lines if line["method"] == name} for name in methods))
    if texts == {line["sequence"] for line in lines if line["method"] == "hads"}:
        return None
    budgets = set.intersection(*({line["budget"] for line in lines if line["method"] == name} for name in methods))
    some = [line for line in lines if line["sequence"] in texts and line["budget"] in budgets]
    rows = as_json({}, summarise(some), ())["methods"]
    return Shared(len(texts), sorted(budgets), rows, _lower(some), _lower(lines))


def _lower(lines: list[dict[str, Any]]) -> Lower:
    kl = {(line["method"], line["sequence"], line["budget"]): line["kl"] for line in lines}
    rivals = [key for key in kl if key[0] in RIVALS or key[0] in STRENGTHENED]
    return Lower(sum(kl["hads", *key[1:]] < kl[key] for key in rivals), len(rivals))
