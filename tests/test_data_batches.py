"""Batches: every sequence once per epoch, the same on every run and every host."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from xsake.model.data.batches import Batches
from xsake.model.data.shards import open_shards, write_shard
from xsake.model.network.sharding import BATCH, make_mesh

LENGTH = 8


@pytest.fixture
def shards(tmp_path):
    """Tokens are numbered consecutively, so that a row tells its place. 12 + 5 windows, and rests."""
    numbers = np.arange(12 * LENGTH + 3 + 5 * LENGTH + 1)
    for number, part in enumerate(np.split(numbers, [12 * LENGTH + 3])):
        write_shard(tmp_path / f"train-{number:05d}.tokens", part, vocab_size=512, tokenizer="t")
    return open_shards(tmp_path, "train")


def epoch(batches: Batches, first: int = 0) -> list[int]:
    """The first tokens of an epoch's rows, with a batch size of 1."""
    rows = [batches.rows(step, 0, 1)[0] for step in range(first, first + batches.windows)]
    assert all((np.diff(row) == 1).all() and len(row) == LENGTH + 1 for row in rows)
    return [int(row[0]) for row in rows]


def test_an_epoch_has_every_window_once_and_the_next_another_order(shards):
    batches = Batches(shards, length=LENGTH, batch=1, seed=3)
    starts = [*range(0, 12 * LENGTH, LENGTH), *range(12 * LENGTH + 3, 17 * LENGTH, LENGTH)]
    first, second = epoch(batches), epoch(batches, batches.windows)
    assert batches.windows == 17 and sorted(first) == sorted(second) == starts
    assert first != second and first != starts
    assert (
        first
        == epoch(Batches(shards, length=LENGTH, batch=1, seed=3))
        != epoch(Batches(shards, length=LENGTH, batch=1, seed=4))
    )
    assert epoch(Batches(shards, length=LENGTH, batch=1, seed=None)) == starts


def test_the_order_is_what_it_always_was(shards):
    """A checkpoint of today must find the same data tomorrow."""
    assert epoch(Batches(shards, length=LENGTH, batch=1, seed=0))[:5] == [8, 88, 107, 64, 131]


def test_batches_run_on_across_epochs(shards):
    one, many = (Batches(shards, length=LENGTH, batch=size, seed=0) for size in (1, 5))
    assert many.per_epoch == 3
    rows = np.concatenate([many.rows(step, 0, 5) for step in range(7)])
    np.testing.assert_array_equal(rows, np.concatenate([one.rows(step, 0, 1) for step in range(35)]))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_on_devices_each_holds_its_rows(shards, microbatches):
    batches = Batches(shards, length=LENGTH, batch=8, seed=0)
    placed = batches.on_devices(1, NamedSharding(make_mesh(4, 2), BATCH), microbatches)
    assert placed.shape == (microbatches, 8 // microbatches, LENGTH + 1) and placed.dtype == np.int32
    np.testing.assert_array_equal(np.asarray(placed).reshape(8, -1), batches.rows(1, 0, 8))
    assert {shard.data.shape for shard in placed.addressable_shards} == {
        (microbatches, 8 // microbatches // 4, LENGTH + 1)
    }


def test_a_process_reads_only_what_its_devices_hold(shards, monkeypatch):
    """As on the second of two hosts: only rows of the second half are read."""
    batches = Batches(shards, length=LENGTH, batch=8, seed=0)
    mesh = make_mesh(4, 2)
    second = set(mesh.devices[2:].flat)
    asked, rows = [], Batches.rows

    def watched(self, step, start, stop):
        asked.append((start, stop))
        return rows(self, step, start, stop)

    def on_the_second_host(shape, sharding, part):
        for device, index in sharding.devices_indices_map(shape).items():
            if device in second:
                part(index)
        return jax.numpy.zeros(shape)

    monkeypatch.setattr(Batches, "rows", watched)
    monkeypatch.setattr(jax, "make_array_from_callback", on_the_second_host)
    batches.on_devices(0, NamedSharding(mesh, BATCH))
    assert set(asked) == {(4, 6), (6, 8)}


def test_wrong_calls(shards):
    with pytest.raises(
        ValueError, match=r"has 140 tokens in train-\*, 1 sequences of 90: fewer than one batch of 2. Build"
    ):
        Batches(shards, length=90, batch=2, seed=0)
    with pytest.raises(ValueError, match="length=0"):
        Batches(shards, length=0, batch=2, seed=0)
    with pytest.raises(ValueError, match="batch=4 must be divisible by microbatches=3"):
        Batches(shards, length=LENGTH, batch=4, seed=0).on_devices(0, NamedSharding(make_mesh(), BATCH), 3)


def test_a_token_outside_the_vocabulary_is_refused(shards):
    spoilt = shards[0].path
    data = bytearray(spoilt.read_bytes())
    data[-2:] = b"\xff\xff"
    spoilt.write_bytes(data)
    batches = Batches(open_shards(spoilt.parent, "train"), length=14, batch=1, seed=None)
    with pytest.raises(ValueError, match=r"train-00000.tokens holds token 65535, outside its vocabulary of 512"):
        for step in range(batches.windows):
            batches.rows(step, 0, 1)
