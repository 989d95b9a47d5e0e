"""Profile files: exact, readable, versioned, and refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import os
from hashlib import sha256
from importlib import resources
from pathlib import Path

import hads_case as case
import numpy as np
import pytest

from benchmarks import record
from xsake.hads import HadsProfile, layer_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import shipped_file
from xsake.hads.profile.rule import VERSION_3, Rule


@pytest.mark.parametrize(("block_q", "blocks"), [(16, "16"), (64, "64 x 16")])
def test_round_trip_is_exact_and_readable(tmp_path: Path, block_q: int, blocks: str):
    profile = case.random_profile(block_q=block_q)
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
    assert f"2 layers, 4 query heads on 2, head_dim 8, blocks of {blocks}, cal" in repr(again)


def test_a_profile_that_is_wrong_is_not_written(tmp_path: Path):
    profile = case.random_profile()
    for change, why in (
        ({"sink": profile.sink * np.nan}, "sink has values that are not finite"),
        ({"sensitivity": -profile.sensitivity}, "sensitivity must be above 0"),
        ({"distance": profile.distance[..., :3]}, r"distance must have shape \(2, 4, 29\), got \(2, 4, 3\)"),
        ({"free_shares": profile.free_shares[::-1]}, "free_shares must rise"),
        ({"kv_heads": 3}, "4 query heads are not a multiple of kv_heads=3"),
        ({"block_q": 24}, "block_q=24 must be a multiple of block=16"),
    ):
        with pytest.raises(ValueError, match=why):
            dataclasses.replace(profile, **change).save(tmp_path / "profile.json")
    assert os.listdir(tmp_path) == []


def test_a_profile_keeps_the_rule_that_it_was_made_with(tmp_path: Path):
    path = tmp_path / "profile.json"
    made_with = Rule(sink_blocks=2, near_blocks=3, dense_rows=1, exact_queries=64, last_rows=5, last_weight=2.5)
    dataclasses.replace(case.random_profile(), rule=made_with).save(path)
    again = HadsProfile.load(path)
    assert again.rule == made_with
    i = np.arange(16)
    forced = (i < 2) | (i[:, None] - i <= 3) | (i[:, None] < 1)
    assert np.array_equal(again.grid(256).forced(), forced & (i[:, None] >= i))
    assert again.grid(256).row_weights().tolist() == [1.0] * 11 + [2.5] * 5


def test_a_profile_in_other_blocks_forces_what_is_forced_in_such_blocks():
    profile = dataclasses.replace(case.random_profile(block=64), rule=Rule(last_weight=2.5, exact_queries=64))
    tall = profile.in_blocks(32, block_q=128)
    assert tall.grid(1024).forced_blocks == CausalGrid.of(1024, 32, block_q=128).forced_blocks
    assert (tall.rule.last_weight, tall.rule.exact_queries, tall.in_blocks(64).rule) == (2.5, 64, profile.rule)
    assert layer_counts(tall, 0.5, 1024).sum() == round(0.5 * tall.layers * tall.q_heads * tall.grid(1024).blocks)
    with pytest.raises(ValueError, match="block_q=48 must be a multiple of block=32"):
        profile.in_blocks(32, block_q=48)


def test_a_profile_of_version_3_has_the_constants_of_that_version(tmp_path: Path):
    """Also if the constants of the present rule differ."""
    path = tmp_path / "profile.json"
    case.random_profile().save(path)
    data = json.loads(path.read_text())
    del data["rule"], data["block_q"]
    # Version 3 also had two numbers for each head that HADS does not use.
    heads = [line | {"entropy": 0.5, "distance_mass": [0.1] * 29} for line in data["heads"]]
    path.write_text(json.dumps(data | {"version": 3, "heads": heads}))
    again = HadsProfile.load(path)
    assert again.rule == VERSION_3 == Rule(last_rows=2, last_weight=4.0, dense_rows=4, exact_queries=0)
    assert not hasattr(again, "entropy") and not hasattr(again, "distance_mass")


def test_a_profile_of_an_earlier_version_chooses_as_it_did_and_says_what_it_lacks(tmp_path: Path):
    path = tmp_path / "profile.json"
    profile = case.random_profile()
    profile.save(path)
    data = json.loads(path.read_text())
    del data["rule"]["exact_queries"]
    lacks = {name: value for name, value in data.items() if name not in ("window", "block_q")}
    path.write_text(json.dumps(lacks | {"version": 4}))
    again = HadsProfile.load(path)
    assert again.block_q == again.block == profile.block
    assert again.rule == dataclasses.replace(profile.rule, exact_queries=0) and again.window is None
    assert "no exact rows" in repr(again) and "no exact rows" not in repr(profile)


def test_recorded_and_shipped_profiles_load():
    recorded = HadsProfile.load(record.RESULTS / "hads" / "profile-8192-64.json")  # of version 3
    assert (recorded.model, recorded.block, recorded.length, recorded.rule) == ("smollm2", 64, 8192, VERSION_3)
    assert HadsProfile.shipped("smollm2").rule == VERSION_3
    for length, nearest in ((0, 2048), (100, 2048), (3000, 2048), (6000, 8192), (10**6, 8192)):
        assert HadsProfile.shipped("smollm2", length).length == nearest
    np.testing.assert_array_equal(HadsProfile.shipped("smollm2", 8192).features, recorded.features)
    with pytest.raises(
        FileNotFoundError, match=r"no profile of 'gpt-9' comes with xsake, only of qwen2\.5-coder-1\.5b, smollm2"
    ):
        HadsProfile.shipped("gpt-9")
    with pytest.raises(FileNotFoundError, match=r"smollm2 does not exist; HadsProfile\.shipped\(model, length\) gives"):
        HadsProfile.load("smollm2")
    for name in ("smollm2-2048.json", "smollm2-8192.json"):
        text = (resources.files("xsake.hads.profile") / "shipped" / name).read_text()
        assert '"version": 4' in text and "entropy" not in text and "distance_mass" not in text


def test_the_shipped_profiles_of_qwen_are_those_of_its_records():
    name = "qwen2.5-coder-1.5b"
    made_with = record.load(f"ruler_{name}")["about"]["profile"]
    of_the_study = HadsProfile.load(record.RESULTS / "hads" / f"profile-{name}-32768-64.json")
    shipped = {length: sha256(shipped_file(name, int(length)).read_bytes()).hexdigest()[:16] for length in made_with}
    assert {length: made_with[length] for length in ("4096", "8192", "32768")} == {
        length: shipped[length] for length in ("4096", "8192", "32768")
    }
    summary = json.loads((record.RESULTS / "hads" / f"summary-{name}-32768-64.json").read_text())
    assert (of_the_study.model, of_the_study.length, of_the_study.block) == tuple(
        summary["about"][key] for key in ("model", "length", "block")
    )


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
    refused("[1, 2]", r"has format \[1, 2\]")
    refused(json.dumps(good | {"version": 99}), "version 99; this xsake reads .* versions 3, 4, 5, 6: calibrate again")
    refused(json.dumps(good | {"format": "other"}), "format 'other'")
    refused(json.dumps({k: v for k, v in good.items() if k != "block"}), "block")
    refused(json.dumps(good | {"block": -64}), "block=-64 must be")
    refused(json.dumps(good | {"heads": good["heads"][:-1]}), "not complete and in order")
    refused(json.dumps(good | {"distance_buckets": [0, 1]}), "features or distance buckets")
    refused(json.dumps(good | {"heads": [*good["heads"][:-1], good["heads"][-1] | {"layer": 10**12}]}), "not complete")
    refused(json.dumps(good | {"heads": []}), "damaged")
    refused(json.dumps(good | {"heads": 7}), "damaged")
    refused(json.dumps(good | {"free_shares": [10**400]}), "damaged")
    refused(json.dumps(good | {"digests": "abc"}), "digests='abc' must be a list, and each item text")
    refused(json.dumps(good | {"digests": ["0123456789abcdef:***"]}), "fingerprint .* is damaged")
    refused(json.dumps(good | {"model": 3}), "model=3 must be text")
    refused(json.dumps(good | {"rule": good["rule"] | {"dense_rows": -1}}), "dense_rows=-1 .* an int of at least 0")
    refused(json.dumps(good | {"rule": good["rule"] | {"own_part": float("nan")}}), "own_part=nan must be a finite")
    refused(json.dumps(good | {"rule": {"colour": 1}}), "colour")
    refused("[" * 100_000, "damaged")
    short = [line | {"features": line["features"][:1]} for line in good["heads"]]
    refused(json.dumps(good | {"heads": short}), "features must have shape")
    for name in ("block", "length", "kv_heads"):
        refused(json.dumps(good | {name: 10**30}), f"{name}=10000.* must be an int of at least 1 and at most")
    refused(json.dumps(good | {"rule": {}}), "Rule has the fields")
    refused(json.dumps(good | {"rule": 7}), "rule=7 must be a table")
    refused(json.dumps(good | {"free_shares": "abc"}), "free_shares must hold numbers in every place")
    refused(json.dumps(good | {"free_shares": [1e300]}), "damaged: free_shares|layer_shares")
    quoted = [line | {"sink": str(line["sink"])} for line in good["heads"]]
    refused(json.dumps(good | {"heads": quoted}), "sink must hold numbers in every place")
    ragged = [good["heads"][0] | {"features": [[1.0], [1.0, 2.0]]}, *good["heads"][1:]]
    refused(json.dumps(good | {"heads": ragged}), "features must have a shape")
    refused(" " * (1 << 26) + "{}", "more than 67,108,864 bytes")
    with pytest.raises(FileNotFoundError):
        HadsProfile.load(tmp_path / "none.json")


def test_the_error_of_a_damaged_profile_does_not_quote_the_profile(tmp_path: Path):
    path = tmp_path / "profile.json"
    file = resources.files("xsake.hads.profile") / "shipped" / "smollm2-2048.json"
    path.write_bytes(file.read_bytes()[:-1000] + b"\xff" + file.read_bytes()[-1000:])
    with pytest.raises(ValueError, match="is damaged: it is not JSON: 'utf-8' codec can't decode byte 0xff") as said:
        HadsProfile.load(path)
    assert len(str(said.value)) < 500
