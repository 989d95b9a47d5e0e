"""The descriptions of documents in dashboard/API.md, for the page /docs: the fields are described once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_FILE = Path(__file__).parents[1] / "API.md"
_HEADING = re.compile(r"^#{2,3} (.*)$", re.MULTILINE)


@cache
def _sections() -> dict[str, str]:
    """Text by the name of the document in its heading; parameters in names are all called {}."""
    text = _FILE.read_text()
    headings = list(_HEADING.finditer(text))
    ends = [one.start() for one in headings[1:]] + [len(text)]
    found = {}
    for heading, end in zip(headings, ends, strict=True):
        if name := re.search(r"`(?:POST )?/?(api/[^`]+)`", heading[1]):
            found[_same(name[1])] = text[heading.end() : end].strip()
    return found


def _same(name: str) -> str:
    """
    >>> _same("api/runs/{run_id}/series")
    'api/runs/{}/series'
    """
    return re.sub(r"\{\w+\}(\.\{\w+\})?", "{}", name)


def described(path: str) -> str:
    """The description of a route such as `/api/runs/{run_id}`. KeyError if API.md has none."""
    return _sections()[_same(path.removeprefix("/"))]
