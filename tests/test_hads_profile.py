"""Profile files: exact, readable, versioned, and refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import hads_case as case
import numpy as np
import pytest

from xsake.hads import HadsProfile


def test_round_trip_is_exact_and_readable(tmp_path: Path):
    profile = case.random_profile()
    path = tmp_path / "profile.json"
    profile.save(path)
    again = HadsProfile.load(path)
    for field in dataclasses.fields(profile):
        before, after = getattr(profile, field.name), getattr(again, field.name)
        assert np.array_equal(before, after) and getattr(after, "dtype", None) == getattr(before, "dtype", None)
    text = path.read_text()
    assert sum('"layer": ' in line for line in text.splitlines()) == profile.layers * profile.q_heads
    again.save(path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["profile.json"]
    assert "2 layers, 4 query heads on 2, head_dim 8, blocks of 16" in repr(again)


def test_a_profile_that_is_wrong_is_not_written(tmp_path: Path):
    profile = case.random_profile()
    for change, why in (
        ({"sink": profile.sink * np.nan}, "sink has values that are not finite"),
        ({"sensitivity": -profile.sensitivity}, "sensitivity must be above 0"),
        ({"distance": profile.distance[..., :3]}, r"distance must have shape \(2, 4, 29\), got \(2, 4, 3\)"),
        ({"free_shares": profile.free_shares[::-1]}, "free_shares must rise"),
        ({"kv_heads": 3}, "4 query heads are not a multiple of kv_heads=3"),
    ):
        with pytest.raises(ValueError, match=why):
            dataclasses.replace(profile, **change).save(tmp_path / "profile.json")
    assert os.listdir(tmp_path) == []


def test_files_that_are_no_profiles(tmp_path: Path):
    path = tmp_path / "profile.json"
    case.random_profile().save(path)
    good = json.loads(path.read_text())

    def refused(text: str, why: str) -> None:
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            HadsProfile.load(path)

    refused("", "not a HADS profile, or is damaged")
    refused(json.dumps(good)[:-20], "damaged")
    refused("[1, 2]", "damaged")
    refused(json.dumps(good | {"version": 99}), "version 99; this xsake reads .* version 3: calibrate again")
    refused(json.dumps(good | {"format": "other"}), "format 'other'")
    refused(json.dumps({k: v for k, v in good.items() if k != "block"}), "block")
    refused(json.dumps(good | {"block": -64}), "block=-64 must be")
    refused(json.dumps(good | {"heads": good["heads"][:-1]}), "not complete and in order")
    refused(json.dumps(good | {"distance_buckets": [0, 1]}), "features or distance buckets")
    short = [line | {"features": line["features"][:1]} for line in good["heads"]]
    refused(json.dumps(good | {"heads": short}), "features must have shape")
    with pytest.raises(FileNotFoundError):
        HadsProfile.load(tmp_path / "none.json")
