"""Masks in files: exact, without pickle, and refused with a reason where damaged."""

from __future__ import annotations

import json
import zipfile

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from drawn_mask import drawn
from hypothesis import given

import xsake
from xsake import BlockMask


@given(drawn(), st.booleans())
def test_save_and_load(tmp_path_factory, d, transpose):
    path = tmp_path_factory.mktemp("mask") / "mask.npz"
    mask = d.build(transpose=transpose)
    mask.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["mask.npz"]
    again = BlockMask.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(mask), "the static fields are part of the structure"
    jax.tree.map(np.testing.assert_array_equal, again, mask)


def _saved(tmp_path):
    path = tmp_path / "mask.npz"
    xsake.patterns.sliding_window(64, 64, window=(20, 3), block_q=16, block_kv=16).save(path)
    return path


def test_file_has_no_pickle(tmp_path):
    with np.load(_saved(tmp_path), allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
    with zipfile.ZipFile(tmp_path / "mask.npz") as archive:
        assert all(name.endswith(".npy") for name in archive.namelist())


def _rewrite_header(path, **changes):
    with np.load(path) as file:
        content = {name: file[name] for name in file.files}
    header = json.loads(str(content["header"])) | changes
    np.savez(path, **(content | {"header": np.array(json.dumps(header))}))


@pytest.mark.parametrize("changes", [{"version": 999}, {"version": None}, {"format": "something else"}])
def test_unknown_versions_are_refused(tmp_path, changes):
    path = _saved(tmp_path)
    _rewrite_header(path, **changes)
    with pytest.raises(ValueError, match=r"mask\.npz has format .* version .*this xsake reads"):
        BlockMask.load(path)


@pytest.mark.parametrize("keep", [0, 1, 30, 300, -1, -30])
def test_truncated_files_are_refused(tmp_path, keep):
    path = _saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_damaged_contents_are_refused(tmp_path):
    path = _saved(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.find(b"kv_indices.npy") + 60
    data[at : at + 20] = bytes(20)
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_files_of_other_things_are_refused(tmp_path):
    for name, write in {
        "text.npz": lambda p: p.write_text("not a mask"),
        "arrays.npz": lambda p: np.savez(p, a=np.zeros(3)),
        "single.npy": lambda p: np.save(p, np.zeros(3)),
        "header.npz": lambda p: np.savez(p, header=np.array("not json")),
        "pickle.npz": lambda p: np.savez(p, header=np.array({"a": 1}, dtype=object)),
    }.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            BlockMask.load(tmp_path / name)


def test_files_with_missing_arrays_are_refused(tmp_path):
    path = _saved(tmp_path)
    with np.load(path) as file:
        content = {name: file[name] for name in file.files if name != "kv_row_ptr"}
    np.savez(path, **content)
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "none.npz")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = _saved(tmp_path)
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        BlockMask.full(32, 32, block_q=16, block_kv=16).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["mask.npz"]
    assert path.read_bytes() == before


def test_a_traced_mask_cannot_be_saved(tmp_path):
    mask = BlockMask.full(32, 32, block_q=16, block_kv=16)
    with pytest.raises(TypeError, match="traced BlockMask cannot be saved"):
        jax.jit(lambda m: m.save(tmp_path / "mask.npz"))(mask)
    assert list(tmp_path.iterdir()) == []
