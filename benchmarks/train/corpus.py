"""Plain text out of Debian packages and Python source archives: a corpus that anybody can have.

    mkdir packages && cd packages
    apt-get download linux-doc-6.1 python3.11-doc perl-doc git-doc dict-foldoc
    apt-get download doc-rfc-std doc-rfc-informational          (the RFCs, from Debian's non-free component)
    pip download --no-deps --no-binary :all: sympy==1.13.3 Django==5.1.4 networkx==3.4.2 sqlalchemy==2.0.36
    cd .. && python -m benchmarks.train.corpus packages text
    xsake data build text --out corpus --vocab 16384

Every text file of every package becomes one file, each text once. Nothing here uses the network.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

TEXT = {".txt", ".rst", ".pod", ".py", ".md", ".dict"}
LEAST_BYTES = 512  # shorter files are stubs


def members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each regular file of a .deb or .tar.gz, unpacked if it is gzipped by itself."""
    if package.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            yield from _read(run.stdout)
        if run.returncode:
            raise SystemExit(f"dpkg-deb could not read {package}")
    else:
        with gzip.open(package) as file:
            yield from _read(file)


def _read(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            packed = path.suffix in (".gz", ".dz")  # dictzip is gzip
            if member.isfile() and (path.with_suffix("") if packed else path).suffix in TEXT:
                file = archive.extractfile(member)
                assert file is not None
                data = file.read()
                yield str(path.with_suffix("") if packed else path), gzip.decompress(data) if packed else data


def extract(packages: list[Path], out: Path) -> dict[str, int]:
    """Write the texts of all packages to `out`; returns bytes of text by package."""
    seen: set[bytes] = set()
    found = {}
    for package in packages:
        name, written = package.name.split("_")[0].removesuffix(".deb").removesuffix(".tar.gz"), 0
        for number, (path, data) in enumerate(members(package)):
            digest = hashlib.sha256(data).digest()
            if len(data) < LEAST_BYTES or digest in seen:
                continue
            seen.add(digest)
            target = out / name / f"{number:06d}-{PurePosixPath(path).name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            written += len(data)
        found[name] = written
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="folder with .deb and .tar.gz files")
    parser.add_argument("out", type=Path, help="folder to make")
    args = parser.parse_args()
    packages = sorted([*args.packages.glob("*.deb"), *args.packages.glob("*.tar.gz")])
    if not packages:
        parser.error(f"no .deb and no .tar.gz in {args.packages}")
    if args.out.exists():
        parser.error(f"{args.out} exists already")
    found = extract(packages, args.out)
    for name, size in found.items():
        print(f"{name:28} {size / 1e6:8.1f} MB")
    print(f"{'together':28} {sum(found.values()) / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
