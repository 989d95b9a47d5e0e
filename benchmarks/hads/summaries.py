"""The summaries of recorded runs, made anew from their records.

    python -m benchmarks.hads.summaries                      rewrites benchmarks/results/hads/summary-*.json
    python -m benchmarks.hads.summaries --texts texts.npz    first makes documents.tsv there

A summary keeps the environment of its run. Where the run went on from records of earlier runs, `earlier` has their
environments, each with the methods whose records are theirs.

Older records do not name the documents of their texts. For these, `documents.tsv` has the document of every text by the
digest of its tokens, from the study's texts made anew by `benchmarks.hads.texts`: a text is found there only if its
tokens are the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.hads.texts import EVALUATION
from xsake._ground import atomic
from xsake.hads.study.summary import as_json, layer_division, retention, summarise
from xsake.hads.study.texts import load_texts

FOLDER = record.RESULTS / "hads"
LENGTHS = (4096, 8192)  # of the recorded studies
# Methods of version 1 of the rivals by their present names. Those with "_older" were mended since: rows could be left
# without a key, and `sparge` had another threshold.
RENAMED = {
    "blasst": "blasst_older",
    "sparge": "sparge_older",
    "sparge+forced": "sparge_older+forced",
    "tca": "hads_shares_top_k",
    "tca+forced": "hads_shares_top_k+forced",
    "vertical_slash": "vertical_slash_older",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="texts.npz of benchmarks.hads.texts, with the texts' documents")
    texts = parser.parse_args().texts
    if texts is not None:
        found = [one for length in LENGTHS for one in load_texts([texts], length=length, domains=EVALUATION)]
        rows = {f"{text.digest}\t{text.document}\n" for text in found}
        atomic.write_text(FOLDER / "documents.tsv", "".join(sorted(rows)))
    for path in sorted(FOLDER.glob("summary-*.json")):
        which = path.stem.removeprefix("summary-")
        about, lines = recorded(which)
        found = {name: of for name, of in json.loads(path.read_text()).items() if name in ("environment", "earlier")}
        found |= as_json(about, summarise(lines), retention(lines)) | extras(lines)
        atomic.write_text(path, json.dumps(found, indent=1) + "\n")
        print(path.name, len(lines), "lines")


def extras(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Parts of the study's summaries beyond `as_json`: what the division among layers is worth, and results with the
    weight of the last rows given to every method and to none, if these were run."""
    lines, found = list(lines), {}
    for last_rows in ("every", "none"):
        if rows := summarise(lines, last_rows=last_rows):
            whole = as_json({}, rows, retention(lines, last_rows))
            found[last_rows] = {name: whole[name] for name in ("methods", "tasks")}
    return {"layer_division": layer_division(lines), "last_rows": found}


def recorded(which: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The subject of the recorded study of this name, and its lines, each with its text's document."""
    documents = dict(line.split("\t") for line in (FOLDER / "documents.tsv").read_text().splitlines())
    about, lines = read(FOLDER / f"records-{which}.jsonl.xz")
    return about, list(with_documents(lines, documents))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The subject of a compressed file of records, and its lines, with the methods' present names."""
    with lzma.open(path, "rt") as file:
        head, *lines = map(json.loads, file)
    renamed = RENAMED if head["about"].get("rivals", 1) == 1 else {}
    return head["about"], [line | {"method": renamed.get(line["method"], line["method"])} for line in lines]


def with_documents(lines: Iterable[dict[str, Any]], documents: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The lines, each with its text's document; `documents` is by digest."""
    for line in lines:
        if "asked" in line or "document" in line:
            yield line
            continue
        if line["digest"] not in documents:
            raise ValueError(f"documents.tsv does not know {line['sequence']} ({line['digest']})")
        yield line | {"document": documents[line["digest"]]}


if __name__ == "__main__":
    main()
