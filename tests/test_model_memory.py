"""The memory that reading a prompt takes: the estimate beside recorded peaks, and what is refused at once."""

from __future__ import annotations

import dataclasses

import hads_case
import pytest
from flax import nnx

from benchmarks import record
from benchmarks.harness.models import MODELS
from xsake.hads import HadsProfile
from xsake.model import HadsBudget, Transformer, generate
from xsake.model.generation import memory
from xsake.model.generation.memory import ReadingMemory, check_memory

LLAMA = dict(batch=1, length=262144, capacity=262144, itemsize=2)


@pytest.mark.parametrize("row", record.load("gpu_prompt_long")["results"], ids=lambda r: f"{r['model']} {r['length']}")
def test_the_estimate_is_near_the_recorded_peak(row):
    config = dataclasses.replace(MODELS[row["model"]][0], layers=row["layers"])
    profile = HadsProfile.shipped("qwen2.5-coder-1.5b", 32768)
    sizes = dict(batch=1, length=row["length"], capacity=row["length"], chunk=None)
    found = ReadingMemory.of(config, **sizes, itemsize=2, profile=profile)
    assert found.total == pytest.approx(row["peak"], rel=0.05)


def test_a_prompt_that_does_not_fit_is_offered_chunks():
    config = MODELS["llama-8b"][0]
    check_memory(config, **LLAMA, chunk=None, limit=80 * 10**9)
    with pytest.raises(
        ValueError, match=r"about 79\.4 GB .* has 60\.0 GB: read it in chunks, chunk=65536 needs about 57"
    ):
        check_memory(config, **LLAMA, chunk=None, limit=60 * 10**9)
    check_memory(config, **LLAMA, chunk=65536, limit=60 * 10**9)
    with pytest.raises(ValueError, match=r"65536 tokens at a time.* chunk=8192 needs about 51"):
        check_memory(config, **LLAMA, chunk=65536, limit=515 * 10**8)
    with pytest.raises(ValueError, match="no chunk is small enough"):
        check_memory(config, **LLAMA, chunk=None, limit=40 * 10**9)


def test_generate_refuses_it_before_anything_runs(monkeypatch):
    model = Transformer(hads_case.TINY, rngs=nnx.Rngs(0))
    monkeypatch.setattr(memory, "memory_limit", lambda: 10**5)
    with pytest.raises(ValueError, match="a prompt of 200 tokens needs about"):
        generate(model, [[1] * 200], max_new_tokens=1)


def test_a_prompt_beyond_the_texts_of_the_profile_is_said_once(caplog):
    memory._tell_beyond.cache_clear()
    budget = HadsBudget(hads_case.random_profile(), 0.5)
    for length in (budget.profile.length, budget.profile.length + 1, budget.profile.length + 2):
        memory.tell_beyond_calibration(budget.profile, length)
    assert [r.message.count(f"{budget.profile.length} tokens") for r in caplog.records] == [1]
