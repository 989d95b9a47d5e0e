"""The fenced blocks of the project's pages: README.md, CONTRIBUTING.md, benchmarks/README.md and docs/."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("python", "pycon")  # executed, in the order of the page
READ = ("console", "diff", "text")  # commands and edits are checked against what exists; text is only read
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


def file_of(block: Block) -> str | None:
    """The file that a block of code is, or quotes, if its first line says so."""
    found = re.match(r"# (\S+\.py)\n", block.text) if block.language == "python" else None
    return found and found[1]


def quote_of(block: Block) -> str | None:
    """The file of this checkout that a block of code quotes, if its first line names one."""
    path = file_of(block)
    return path if path and (ROOT / path).exists() else None


def edited(page: Path) -> dict[str, str]:
    """The files that a page's `diff` blocks edit, as they are after all edits in the order of the page.

    A block begins with `+++ path`; `...` stands between its hunks, whose old lines must be in the file once.
    """
    files: dict[str, str] = {}
    for block in blocks_of(page):
        if block.language != "diff":
            continue
        first, _, rest = block.text.partition("\n")
        path = first.removeprefix("+++ ")
        text = files.get(path) or (ROOT / path).read_text()
        for hunk in re.split(r"^\.\.\.\n", rest, flags=re.MULTILINE):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] or "\n" for line in lines if line[0] != kind) for kind in "+-")
            assert text.count(old) == 1, (
                f"{name_of(page)}, line {block.line}: {path} has {text.count(old)} times\n{old}"
            )
            text = text.replace(old, new)
        files[path] = text
    return files
