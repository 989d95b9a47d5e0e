"""Token files: what is written is read back, and incomplete files are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from xsake.model.data.shards import HEADER_BYTES, open_shard, open_shards, token_dtype, write_shard


def write(path, tokens=range(100), vocab_size=512, tokenizer="abc"):
    write_shard(path, np.asarray(tokens), vocab_size=vocab_size, tokenizer=tokenizer)
    return path


@pytest.mark.parametrize("vocab_size, width", [(512, 2), (2**16, 2), (2**16 + 1, 4)])
def test_round_trip_memory_mapped_in_the_smallest_type(tmp_path, vocab_size, width):
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
    tokens[:2] = 0, vocab_size - 1
    path = write(tmp_path / "train-00000.tokens", tokens, vocab_size)
    shard = open_shard(path)
    assert isinstance(shard.tokens, np.memmap) and shard.tokens.dtype.itemsize == width
    np.testing.assert_array_equal(shard.tokens, tokens)
    assert (shard.vocab_size, shard.tokenizer) == (vocab_size, "abc")
    assert path.stat().st_size == HEADER_BYTES + 1000 * width
    assert json.loads(path.read_bytes()[:HEADER_BYTES])["tokens"] == 1000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing half-written is left


@pytest.mark.parametrize("lost", [1, 50, 200])
def test_a_truncated_file_is_refused(tmp_path, lost):
    path = write(tmp_path / "train-00000.tokens")
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ValueError, match=r"train-00000.tokens is truncated: its header promises 100 tokens"):
        open_shard(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "train-00000.tokens"
    for data in (b"", b"hello", b'{"format": "other"}', b"\x00" * 5000, b"[]", b"[" * 4096):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is no token file"):
            open_shard(path)
    good = json.loads(write(tmp_path / "first.tokens").read_bytes()[:HEADER_BYTES])
    wrong = ({"dtype": "float64"}, {"dtype": ["u2"]}, {"tokens": -1}, {"tokens": "100"}, {"tokens": True})
    for change in (*wrong, {"tokens": 10**30}, {"vocab_size": 0}, {"vocab_size": "x"}, {"tokenizer": 5}, {"format": 1}):
        path.write_bytes(json.dumps(good | change).encode().ljust(HEADER_BYTES) + bytes(200))
        with pytest.raises(ValueError, match=rf"is no token file: .* \({next(iter(change))}=.* must be"):
            open_shard(path)
    later = json.loads(write(tmp_path / "good.tokens").read_bytes()[:HEADER_BYTES]) | {"version": 2}
    path.write_bytes(json.dumps(later).encode().ljust(HEADER_BYTES) + bytes(200))
    with pytest.raises(ValueError, match="version 2 of the token format; this xsake reads version 1"):
        open_shard(path)


def test_nothing_is_overwritten_and_nothing_wrong_is_written(tmp_path):
    path = write(tmp_path / "train-00000.tokens")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="not overwritten"):
        write(path, [1, 2])
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="tokens run from 0 to 512, outside vocab_size=512"):
        write(tmp_path / "train-00001.tokens", [0, 512])
    with pytest.raises(ValueError, match="vocab_size=0"):
        token_dtype(0)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_split_is_of_one_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no train-\*.tokens file"):
        open_shards(tmp_path, "train")
    write(tmp_path / "train-00001.tokens", [3, 4])
    write(tmp_path / "train-00000.tokens", [1, 2])
    write(tmp_path / "held-00000.tokens", [9])
    assert [int(shard.tokens[0]) for shard in open_shards(tmp_path, "train")] == [1, 3]
    write(tmp_path / "train-00002.tokens", tokenizer="other")
    with pytest.raises(ValueError, match="different tokenizers"):
        open_shards(tmp_path, "train")
