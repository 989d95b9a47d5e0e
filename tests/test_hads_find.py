"""Profiles that find themselves by a model's weights, and the texts that come with xsake."""

from __future__ import annotations

import dataclasses

import hads_case as case
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.hads import HadsProfile
from xsake.hads.calibration.own_texts import own_texts
from xsake.hads.profile import find

WEIGHTS = {"embed": np.arange(300, dtype=np.float32).reshape(30, 10), "layers": [np.ones((4, 5, 2), np.float32)]}
PROFILE = case.random_profile()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path))


def test_a_key_is_of_weights_whatever_their_type():
    key = find.key_of(WEIGHTS)
    assert key == find.key_of({name: x for name, x in WEIGHTS.items()} | {"step": np.arange(3)})
    half = {"embed": jnp.asarray(WEIGHTS["embed"], jnp.bfloat16), "layers": [jnp.ones((4, 5, 2), jnp.bfloat16)]}
    assert key == find.key_of(half)
    trained = WEIGHTS | {"embed": WEIGHTS["embed"] * 1.01}
    reshaped = WEIGHTS | {"embed": WEIGHTS["embed"].reshape(10, 30)}
    assert len({key, find.key_of(trained), find.key_of(reshaped)}) == 3


def test_the_kept_profile_of_the_nearest_length_is_found():
    assert HadsProfile.find(WEIGHTS) is None
    paths = {length: dataclasses.replace(PROFILE, length=length).keep(WEIGHTS) for length in (256, 4096)}
    assert [HadsProfile.find(WEIGHTS, length).length for length in (0, 900, 2000)] == [256, 256, 4096]
    assert HadsProfile.find(WEIGHTS | {"more": np.ones(3, np.float32)}) is None
    paths[4096].write_text("nothing")
    with pytest.warns(RuntimeWarning, match="left out"):
        assert HadsProfile.find(WEIGHTS, 4096).length == 256


def test_shipped_profiles_have_keys():
    keys = (find.resources.files("xsake.hads.profile") / "shipped" / "keys.txt").read_text()
    assert sorted(keys.split()[1::2]) == ["qwen2.5-coder-1.5b", "smollm2", "smollm2"]  # in JAX, and in torch


@pytest.mark.pretrained
def test_smollm2_finds_its_shipped_profile(monkeypatch):
    from xsake.model import load_pretrained

    monkeypatch.delenv("XSAKE_CACHE")
    assert HadsProfile.find(load_pretrained("smollm2"), 8192).model == "smollm2"


def test_texts_that_come_with_xsake():
    """Every second one states numbers and asks for them at its end; no text is in two of them."""
    texts = own_texts(lambda text: list(text.encode()), length=4096, count=5)
    assert texts.shape == (5, 4096) and texts.dtype == np.int32
    said = [bytes(row.tolist()).decode() for row in texts.astype(np.uint8)]
    for number, text in enumerate(said):
        asked = text[-300:].count("The number of the ")
        assert asked == (0 if number % 2 else 4) and text.count("The number of the ") == 2 * asked
        for line in text[-150:].splitlines()[1:] if asked else ():
            assert text.count(line) == (2 if line else text.count(""))
    assert len({text[:200] for text in said}) == 5
    assert "In the beginning" in said[0] and "from __future__" in said[1] and "TEMPEST" in said[2]
