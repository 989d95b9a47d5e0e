"""Masks in files: exact, without pickle, and refused with a reason where damaged."""

from __future__ import annotations

import json
import tracemalloc
import zipfile

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from drawn_mask import drawn
from hypothesis import given

import xsake
from xsake import BlockMask
from xsake.hads.mask.lists.check import check
from xsake.hads.mask.lists.mask_lists import MaskLists


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


# -- contents ------------------------------------------------------------------------------------------------------


def _on_host(mask):
    """What a file would hold of a concrete mask."""
    return MaskLists(**{name: np.asarray(x) if hasattr(x, "shape") else x for name, x in vars(mask).items()})


@given(drawn(), st.booleans())
def test_what_constructors_make_passes_the_check_of_files(d, transpose):
    mask = d.build(transpose=transpose)
    check(_on_host(mask))
    check(_on_host(mask | BlockMask.full(**d.sizes)))


def _tokens():
    """A mask with bitmaps, each query's own choice of blocks."""
    chosen = np.random.default_rng(0).integers(-1, 8, (1, 64, 2, 3))
    return BlockMask.from_token_indices(chosen, block_kv=8, block_q=16)


@jax.jit
def _overflowing(blocks):
    return BlockMask.from_blocks(blocks, q_len=64, kv_len=64, block_q=16, block_kv=16, capacity=5)


MASKS = {
    "rule": lambda: xsake.patterns.sliding_window(64, 64, window=(20, 3), block_q=16, block_kv=16),
    "heads": lambda: xsake.patterns.random(64, 64, density=0.5, seed=0, heads=2, block_q=16, block_kv=16),
    "bitmaps": _tokens,
    "bitmaps under jit": lambda: jax.jit(_tokens)(),
    "no transpose": lambda: BlockMask.full(64, 64, block_q=16, block_kv=16, is_causal=True, transpose=False),
    "overflowed": lambda: _overflowing(np.ones((2, 4, 4), bool)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_kind_return_from_a_file(tmp_path, name):
    mask = MASKS[name]()
    mask.save(tmp_path / "mask.npz")
    again = BlockMask.load(tmp_path / "mask.npz")
    assert jax.tree.structure(again) == jax.tree.structure(mask)
    jax.tree.map(np.testing.assert_array_equal, again, mask)


def _static(**changes):
    def change(arrays):
        header = json.loads(str(arrays["header"]))
        return arrays | {"header": np.array(json.dumps(header | {"static": header["static"] | changes}))}

    return change


def _array(name, change):
    return lambda arrays: arrays | {name: change(arrays[name])}


def _entry(name, place, value):
    def change(array):
        array = array.copy()
        array.reshape(-1)[place] = value
        return array

    return _array(name, change)


HOSTILE = {
    "a block out of range": ("rule", _entry("kv_indices", 0, 2**31 - 1), "kv_indices holds 2147483647, where 0 to 3"),
    "a negative block": ("rule", _entry("kv_indices", 0, -7), "kv_indices holds -7, where 0 to 3 can be"),
    "a negative row": ("rule", _entry("q_indices", 0, -7), "q_indices holds -7"),
    "no numbers": ("rule", _array("kv_indices", lambda x: x * np.nan), r"kv_indices must be int32\[.*\], not float64"),
    "complex numbers": ("rule", _array("kv_indices", lambda x: x * 1j), "not complex128"),
    "more dimensions": ("rule", _array("kv_indices", lambda x: x[None]), "kv_indices must be int32"),
    "no slots": ("rule", _array("kv_indices", lambda x: x[..., :0]), r"not int32\[1, 1, 0\]"),
    "fewer slots": ("rule", _array("q_indices", lambda x: x[..., 1:]), "q_indices must be int32"),
    "other heads": ("heads", _array("kv_row_ptr", lambda x: x[:, :1]), "kv_row_ptr must be int32"),
    "other byte order": ("rule", _array("kv_indices", lambda x: x.astype(">i4")), "not >i4"),
    "a pointer that falls": ("rule", _entry("kv_row_ptr", 1, -7), "kv_row_ptr must begin at 0 and never fall"),
    "pointers from 1": ("rule", _entry("kv_row_ptr", 0, 1), "kv_row_ptr must begin at 0"),
    "pointers past the slots": ("rule", _entry("kv_row_ptr", -1, 99), "complete=True, but kv_row_ptr counts more"),
    "too many full": ("rule", _entry("kv_num_full", 0, 3), "kv_num_full holds 3, where 0 to"),
    "full that is not": ("rule", _entry("kv_num_full", 0, 1), "kv_num_full counts blocks as full of which not"),
    "a row twice in the order": ("rule", _array("row_order", lambda x: x * 0), "row_order must name each row once"),
    "a block twice": ("rule", _entry("kv_indices", 1, 0), "kv_indices must rise among"),
    "a block that the rule excludes": ("rule", _entry("kv_indices", 1, 3), "lists blocks that is_causal or local"),
    "other columns": ("heads", _array("q_indices", lambda x: x[:, ::-1]), "q_"),
    "a bitmap out of range": ("bitmaps", _entry("kv_bitmap", 0, 10**6), "kv_bitmap holds 1000000, where 0 to"),
    "other bitmaps": ("bitmaps", _array("q_bitmap", lambda x: x * 0), "q_bitmap does not give blocks the same bitmaps"),
    "bitmaps as int32": ("bitmaps", _array("bitmaps", lambda x: x.view(np.int32)), "bitmaps must be uint32"),
    "wide bitmaps": ("bitmaps", _array("bitmaps", lambda x: x.repeat(3, -1)), "bitmaps must have one of the sizes"),
    "bitmaps alone": ("bitmaps", lambda a: {n: x for n, x in a.items() if n != "kv_bitmap"}, "kv_bitmap"),
    "an array beside": ("rule", lambda arrays: arrays | {"more": np.zeros(3)}, r"fields \['more'\] are missing or unk"),
    "block_q -1": ("rule", _static(block_q=-1), "block_q=-1 must be an int of at least 1"),
    "block_q text": ("rule", _static(block_q="x"), "block_q='x' must be an int"),
    "block_q table": ("rule", _static(block_q={}), r"block_q=\{\} must be an int"),
    "block_kv another": ("rule", _static(block_kv=32), "must be int32"),
    "q_len huge": ("rule", _static(q_len=10**30), "q_len=1000.* must be an int of at least 1 and at most"),
    "blocks without number": ("no transpose", _static(kv_len=2**30, block_kv=1), "blocks are more than 2147483647"),
    "is_causal 1": ("rule", _static(is_causal=1), "is_causal=1 must be True or False"),
    "a window of text": ("rule", _static(local_window_size="ab"), "local_window_size='ab' must be None, or a pair"),
    "a window of three": ("rule", _static(local_window_size=[1, 2, 3]), "local_window_size=.* must be None, or a pair"),
    "density_hint text": ("rule", _static(density_hint="x"), "density_hint='x' must be None, or a finite number"),
    "complete that is not": ("overflowed", _static(complete=True), "complete=True, but kv_row_ptr counts more"),
    "a list that is a number": ("no transpose", _static(q_indices=5), "q_row_ptr is missing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_contents_that_no_constructor_makes_are_refused(tmp_path, name):
    kind, change, message = HOSTILE[name]
    path = tmp_path / "mask.npz"
    MASKS[kind]().save(path)
    with np.load(path) as file:
        content = change(dict(file))
    np.savez(path, **content)
    with pytest.raises(ValueError, match=message) as said:
        BlockMask.load(path)
    assert "\n" not in str(said.value) and len(str(said.value)) < 1000
    assert str(said.value).startswith(f"{path} is not a BlockMask file, or is damaged: ")


def test_a_file_that_unpacks_to_more_than_is_allowed_is_not_unpacked(tmp_path):
    path = _saved(tmp_path)
    with np.load(path) as file:
        unpacked = sum(array.nbytes for array in dict(file).values())
    BlockMask.load(path, most_bytes=2 * unpacked + 4096)
    with pytest.raises(ValueError, match=f"unpacks to .* bytes, and at most {unpacked:,} are read"):
        BlockMask.load(path, most_bytes=unpacked)


def test_an_archive_that_understates_its_size_is_not_unpacked_further(tmp_path):
    path = tmp_path / "mask.npz"
    zeros = np.zeros(1 << 25, np.int8)
    np.savez_compressed(path, kv_indices=zeros)
    data, true = path.read_bytes(), (zeros.nbytes + 128).to_bytes(4, "little")
    assert data.count(true) >= 1
    path.write_bytes(data.replace(true, (1000).to_bytes(4, "little")))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"mask\.npz is not a file of arrays \(\.npz\), or is damaged"):
            BlockMask.load(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
