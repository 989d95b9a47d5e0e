"""A tiny run for the tests of training: data with structure, and a configuration that learns it in seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from xsake.model.data.shards import write_shard
from xsake.model.network.config import PRESETS, ModelConfig
from xsake.model.training.config import TrainConfig
from xsake.model.training.watch.run_file import read_events

MODEL: ModelConfig = dataclasses.replace(PRESETS["tiny"], vocab_size=128, layers=1)


def make_data(folder: Path, *, vocab_size: int = 128) -> Path:
    """One text of 300 tokens, repeated: the next token can be predicted."""
    folder.mkdir(parents=True)
    text = np.random.default_rng(0).integers(0, vocab_size, 300)
    about: dict[str, Any] = dict(vocab_size=vocab_size, tokenizer="test")
    write_shard(folder / "train-00000.tokens", np.tile(text, 20), **about)
    write_shard(folder / "held-00000.tokens", np.tile(text, 3), **about)
    return folder


def make_config(**changes: Any) -> TrainConfig:
    base = TrainConfig(
        model=MODEL,
        length=64,
        batch=4,
        steps=6,
        warmup=2,
        learning_rate=1e-2,
        attention="sink_window",
        density=0.7,
        block=16,
        dtype="float32",
        loss_chunk=128,
    )
    return dataclasses.replace(base, **changes)


def events(run_file: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [event for event in read_events(run_file) if event["event"] == kind]


def losses(run_file: Path) -> list[float]:
    """By step, each step once and in order."""
    found = events(run_file)
    assert [event["step"] for event in found] == list(range(1, len(found) + 1))
    return [event["loss"] for event in found]
