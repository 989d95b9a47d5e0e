"""The texts of the HADS study, as tokens of a model: eight domains out of Debian packages, and three tasks, each
asked at the end and in the middle.

    mkdir packages && cd packages
    apt-get download linux-doc-6.1 perl-doc git-doc postgresql-doc-15 python3.11-doc libpython3.11-stdlib anarchism
    apt-get download doc-rfc-std                                (from Debian's non-free component)
    cd .. && python -m benchmarks.hads.texts packages --out texts.npz
    python -m benchmarks.hads.texts packages --model qwen2.5-coder-1.5b --length 32768 --count 3 --one-each \\
        --without pydoc_data --tasks 2 --out qwen/texts.npz

Calibrate on some domains and evaluate on others: CALIBRATION and EVALUATION below. A sequence lies within one document
where the document is long enough; otherwise short documents follow one another. DOMAIN.documents in the file names the
document of every sequence, for intervals that do not take two parts of a document for two independent texts. Nothing
here uses the network.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from benchmarks.hads import tasks
from xsake.model import load_tokenizer

CALIBRATION = {
    "kernel": ("linux-doc-6.1", "**/Documentation/**/*.rst.gz"),
    "perl": ("perl-doc", "**/*.pod"),
    "git": ("git-doc", "**/*.txt"),
    "postgres": ("postgresql-doc-15", "**/*.html"),
}
EVALUATION = {
    "pydocs": ("python3.11-doc", "**/_sources/**/*.txt"),
    "rfc": ("doc-rfc-std", "**/rfc[0-9]*.txt.gz"),
    "code": ("libpython3.11-stdlib", "**/*.py"),
    "prose": ("anarchism", "**/*.html"),
}
TASK_FILLER = "prose"
FROM_ONE_DOCUMENT = 8  # sequences at most, so that there are many documents
LEAST_CHARACTERS = 4000  # shorter documents are stubs
SHORT = "short documents"  # the name that all sequences have that are made of several documents


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8", "replace")
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
        text = re.sub(r"\n\s*\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", text)))
    if path.name.startswith("rfc"):  # the feet and heads of printed pages
        text = re.sub(r"\n+[^\n]*\[Page \d+\]\n\f?\n?[^\n]*\n+", "\n\n", text)
    return text


def documents(
    package: Path,
    pattern: str,
    encode: Callable[[str], list[int]],
    is_enough: Callable[[Collection[np.ndarray]], bool],
    without: str | None = None,
) -> dict[str, np.ndarray]:
    """Different documents by their paths, in a random order, until there are enough; no path that holds `without`."""
    found: dict[str, np.ndarray] = {}
    seen: set[bytes] = set()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        paths = sorted(path for path in Path(folder).glob(pattern) if path.is_file() and not path.is_symlink())
        random.Random(0).shuffle(paths)
        for path in paths:
            if without is not None and without in str(path.relative_to(folder)):
                continue
            text = read(path)
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen or len(text) < LEAST_CHARACTERS:
                continue
            seen.add(digest)
            found[str(path.relative_to(folder))] = np.asarray(encode(text), np.uint32)
            if is_enough(found.values()):
                break
    return found


def sequences(
    found: dict[str, np.ndarray], length: int, count: int, from_one: int = FROM_ONE_DOCUMENT
) -> tuple[np.ndarray, np.ndarray]:
    """u32[N, length], N at most `count`, from long documents first, then from short ones one after the other; and
    str[N], the document of each sequence.

    Neighbours in the run of short documents share the document that one ends and the other begins with. So the whole
    run counts as one document.
    """
    cuts = [
        (name, document[n * length : (n + 1) * length])
        for name, document in found.items()
        for n in range(min(len(document) // length, from_one))
    ]
    short = np.concatenate([np.zeros(0, np.uint32), *(d for d in found.values() if len(d) < length)])
    cuts += [(SHORT, short[n * length : (n + 1) * length]) for n in range(len(short) // length)]
    names, tokens = zip(*cuts[:count], strict=True)
    return np.stack(tokens), np.array(names)


def narrow(tokens: np.ndarray) -> np.ndarray:
    """The tokens in 16 bits where that is enough: in 32 bits the file of a small vocabulary would be larger."""
    return tokens.astype(np.uint16 if tokens.max(initial=0) < 2**16 else np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence; an evaluation may use fewer")
    parser.add_argument("--count", type=int, default=64, help="sequences per domain")
    parser.add_argument(
        "--one-each", action="store_true", help="one sequence per document, as long as there are documents long enough"
    )
    parser.add_argument("--without", help="leave out documents whose path holds this text")
    parser.add_argument("--tasks", type=int, default=32, help="sequences per task")
    args = parser.parse_args()

    encode = load_tokenizer(args.model).encode
    arrays = {}
    from_one = 1 if args.one_each else FROM_ONE_DOCUMENT

    def is_enough(documents: Collection[np.ndarray]) -> bool:
        if args.one_each:
            return sum(len(one) >= args.length for one in documents) >= args.count
        return sum(map(len, documents)) > 2 * args.count * args.length

    for domain, (name, pattern) in (CALIBRATION | EVALUATION).items():
        packages = sorted(args.packages.glob(f"{name}_*.deb"))
        if not packages:
            raise SystemExit(f"{args.packages} has no {name}_*.deb: the top of this file says how to get it")
        found = documents(packages[0], pattern, encode, is_enough, args.without)
        arrays[domain], names = sequences(found, args.length, args.count, from_one)
        arrays[f"{domain}.documents"] = names
        print(f"{domain}: {len(names)} sequences from {len(set(names))} documents", flush=True)
    for length in (args.length // 2, args.length) if args.tasks else ():
        made = tasks.make(arrays[TASK_FILLER][: args.tasks, :length], encode)
        for name in tasks.NAMES:
            texts = [text for text in made if text.domain == name]
            arrays[f"{name}-{length}"] = np.stack([text.tokens for text in texts])
            arrays[f"{name}-{length}.items"] = np.stack([text.items for text in texts]).astype(np.uint16)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    numbers = {name: array if array.dtype.kind == "U" else narrow(array) for name, array in arrays.items()}
    np.savez_compressed(args.out, **numbers)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
