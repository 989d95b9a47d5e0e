"""The fenced blocks of the project's pages: README.md, CONTRIBUTING.md, benchmarks/README.md and docs/."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("python", "pycon")  # executed, in the order of the page
READ = ("console", "text", "json", "toml")  # commands are checked against what exists; the rest is only read
_FENCE = re.compile(r"^( *)(`{3,})(\{?[\w-]*\}?)([^\n]*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    language: str  # of a directive, its name in braces
    text: str
    line: int


def every_page() -> list[Path]:
    tops = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
    found = [ROOT / name for name in tops if (ROOT / name).exists()]
    return [*found, *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[3], m[5], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands_of(page: Path) -> list[str]:
    """The lines of its `console` blocks, continued lines joined, comments left out."""
    found = []
    for block in blocks_of(page):
        if block.language == "console":
            joined = block.text.replace("\\\n", " ")
            found += [line.split("  #")[0].strip() for line in joined.splitlines() if not line.startswith("#")]
    return [line.removeprefix("$ ") for line in found if line]
