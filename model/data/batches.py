"""Batches of sequences from token files: shuffled, the same on every run, and made from their number alone.

A batch is a function of (seed, step). So the position in the data is the step, resuming needs nothing else, and a
process reads only the rows that its own devices hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from xsake.model.data.shards import Shard


class Batches:
    """Windows of `length` tokens and the token after them. The inputs do not overlap; an epoch has each window once.

    Args:
      shards: open token files of one tokenizer; a window does not cross from one file into the next.
      length: inputs of a sequence; a row has one token more, since targets are the inputs moved by one.
      batch: sequences in a batch.
      seed: of the order of the windows, which differs from epoch to epoch; None keeps the order of the files.
    """

    def __init__(self, shards: Sequence[Shard], *, length: int, batch: int, seed: int | None):
        if length < 1 or batch < 1:
            raise ValueError(f"{length=} and {batch=} must be at least 1")
        self.shards, self.length, self.batch, self.seed = shards, length, batch, seed
        counts = [max(0, (len(shard.tokens) - 1) // length) for shard in shards]
        self._ends = np.cumsum(counts)
        self.windows = int(self._ends[-1])
        if self.windows < batch:
            tokens, longest = (how(len(shard.tokens) for shard in shards) for how in (sum, max))
            folder, split = shards[0].path.parent, shards[0].path.name.partition("-")[0]
            cures = ["Build more text" if split == "train" else "Hold out more (xsake data build --holdout)"]
            cures += [f"take length={(longest - 1) // batch}"] if longest > batch else []
            cures += [f"take batch={self.windows}"] if self.windows else []
            raise ValueError(
                f"{folder} has {tokens} tokens in {split}-*, {self.windows} sequences of {length}: "
                f"fewer than one batch of {batch}. {', or '.join(cures)}"
            )

    @property
    def per_epoch(self) -> int:
        return self.windows // self.batch

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of batch number `step`: i32[stop - start, length + 1]."""
        return np.stack([self._row(step * self.batch + row) for row in range(start, stop)])

    def _row(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.windows)
        window = place if self.seed is None else int(_order(self.seed, epoch, self.windows)[place])
        which = int(np.searchsorted(self._ends, window, side="right"))
        shard, first = self.shards[which], window - (int(self._ends[which - 1]) if which else 0)
        row = shard.tokens[first * self.length : (first + 1) * self.length + 1].astype(np.int32)
        if row.max() >= shard.vocab_size:  # an embedding would quietly take its last row
            raise ValueError(f"{shard.path} holds token {row.max()}, outside its vocabulary of {shard.vocab_size}")
        return row

    def on_devices(self, step: int, sharding: jax.sharding.Sharding, microbatches: int = 1) -> jax.Array:
        """Batch number `step` as i32[microbatches, batch / microbatches, length + 1], one array over all processes."""
        if self.batch % microbatches:
            raise ValueError(f"batch={self.batch} must be divisible by {microbatches=}")
        size = self.batch // microbatches

        def part(index: Any) -> np.ndarray:
            micro, rows, columns = index
            start, stop, _ = rows.indices(size)
            parts = [self.rows(step, m * size + start, m * size + stop) for m in range(*micro.indices(microbatches))]
            return np.stack(parts)[:, :, columns]

        return jax.make_array_from_callback((microbatches, size, self.length + 1), sharding, part)


@lru_cache(maxsize=2)  # a batch may lie across two epochs
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    # RandomState and not Generator: numpy promises that the numbers of RandomState never change.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch]))).permutation(windows)
