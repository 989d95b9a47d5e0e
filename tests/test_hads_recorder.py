"""Recordings for the explorer: masks, masses and results are those of the model, of `BlockMask` and of `evaluate`."""

from __future__ import annotations

import dataclasses

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake import hads
from xsake.dashboard.read.coding import decode_levels, decode_mask, full_square
from xsake.dashboard.show.recorder import Recorder
from xsake.hads import HadsMask
from xsake.hads.calibration.observe import observe
from xsake.hads.profile.rule import Rule
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.records import Records
from xsake.hads.study.texts import Text
from xsake.model import Transformer

PROFILE = case.random_profile(head_dim=16)
LENGTH = 200
TOKENS = np.random.default_rng(0).integers(0, 512, LENGTH).astype(np.int32)
BUDGETS, METHODS = (0.6,), ("hads", "sink_window")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return case.tiny_model()


@pytest.fixture(scope="module")
def recorder(model: Transformer) -> Recorder:
    return Recorder(
        model,
        PROFILE,
        encode=lambda text: [int(word) for word in text.split()],
        decode=lambda tokens: " ".join(map(str, tokens)),
    )


@pytest.fixture(scope="module")
def recorded(recorder: Recorder) -> tuple[dict, list]:
    told: list = []
    text = " ".join(map(str, TOKENS.tolist()))
    found = recorder.record_text(
        text,
        identity="x",
        title="numbers",
        length=LENGTH,
        budgets=BUDGETS,
        methods=METHODS,
        progress=lambda stage, done, of: told.append((stage, done, of)),
    )
    return found, told


@pytest.mark.slow
def test_masks_are_those_of_the_model_block_by_block(model: Transformer, recorded):
    about, layers = recorded[0]["about"], recorded[0]["layers"]
    side = about["side"]
    mask_fn = HadsMask.of(jax.tree.map(jnp.asarray, PROFILE), BUDGETS[0], LENGTH, transpose=False)
    seen = []

    def watched(layer, query, key):
        mask = mask_fn(layer, query, key)
        seen.append(np.asarray(mask.to_blocks()[0]))
        return mask

    model.hidden(jnp.asarray(TOKENS[None]), mask_fn=watched)
    for number, blocks in enumerate(seen):
        for head in range(PROFILE.q_heads):
            code = layers[number]["heads"][head]["kept"]["hads"]["0.6"]
            np.testing.assert_array_equal(full_square(decode_mask(code, side * (side + 1) // 2)), blocks[head])
            share = about["shares"]["hads"]["0.6"][number][head]
            assert share == pytest.approx(blocks[head].sum() / (side * (side + 1) / 2), abs=1e-5)


def test_masses_are_those_of_dense_attention(model: Transformer, recorded):
    about, layers = recorded[0]["about"], recorded[0]["layers"]
    for number, one in enumerate(observe(model, jnp.asarray(TOKENS[None]), PROFILE.grid(len(TOKENS)))):
        mass = np.asarray(one.statistics.mass[0])
        for head in range(PROFILE.q_heads):
            entry = layers[number]["heads"][head]
            read = full_square(decode_levels(entry["mass"]))
            np.testing.assert_allclose(read, mass[head], rtol=0.023, atol=2**-15.9)
            np.testing.assert_allclose(read.sum(1), 1, rtol=0.03)
            omega, phi = PROFILE.sensitivity[number, head], PROFILE.burstiness[number, head]
            share = np.asarray(one.statistics.share[0, head])
            weight = PROFILE.grid(LENGTH).row_weights()[:, None]
            cost = full_square(decode_levels(entry["cost"])) * entry["cost_scale"]
            np.testing.assert_allclose(
                cost, np.tril(omega * weight * share * (share + phi)), rtol=0.03, atol=entry["cost_scale"] * 2**-15
            )
    assert [block["end"] for block in about["blocks"]][-1] == LENGTH
    assert about["blocks"][1]["text"] == " ".join(map(str, TOKENS[16:32].tolist()))


@pytest.mark.slow
def test_results_are_those_of_evaluate(model: Transformer, recorded, tmp_path):
    about = recorded[0]["about"]
    records = Records(tmp_path / "records.jsonl", {"model": "tiny"})
    evaluate(model, PROFILE, [Text("x", "x", TOKENS)], methods=METHODS, budgets=BUDGETS, records=records)
    wanted = {line["method"]: line for line in records}
    for row in about["results"]:
        line = wanted[row["method"]]
        for name, other in (
            ("kl", "kl"),
            ("loss", "sparse_loss"),
            ("same_token", "same_token"),
            ("density", "density"),
        ):
            assert row[name] == pytest.approx(line[other], rel=1e-4, abs=1e-6)
    assert about["loss"] == pytest.approx(wanted["hads"]["loss"], rel=1e-5)
    stages = recorded[1]
    assert [done for _, done, _ in stages] == list(range(6)) and {of for _, _, of in stages} == {6}


def test_tall_rows_are_shown_as_square_blocks(model: Transformer):
    profile = dataclasses.replace(case.random_profile(head_dim=16, block_q=32), rule=Rule.of_blocks(2))
    tall = Recorder(model, profile, encode=lambda text: [int(word) for word in text.split()], decode=str)
    text = " ".join(map(str, TOKENS.tolist()))
    found = tall.record_text(text, identity="x", title="x", length=LENGTH, budgets=[0.8], methods=["hads"])
    about, side = found["about"], -(-LENGTH // 16)
    assert (about["side"], about["block"], about["block_q"]) == (side, 16, 32) and len(about["blocks"]) == side
    wanted = np.asarray(hads.layer_counts(profile, 0.8, LENGTH)) / profile.grid(LENGTH).blocks
    np.testing.assert_allclose(np.sum(about["shares"]["hads"]["0.8"], 1), wanted, atol=1e-4)
    for layer in found["layers"]:
        for head in layer["heads"]:
            kept = full_square(decode_mask(head["kept"]["hads"]["0.8"], side * (side + 1) // 2))
            upper, lower = kept[0:-1:2], kept[1::2]
            assert (
                upper == lower * np.tri(side, dtype=bool)[0:-1:2]
            ).all()  # a row of the profile is two that are shown


def test_what_cannot_be_recorded_is_told(recorder: Recorder):
    def record(count, **options):
        text = " ".join(map(str, range(count)))
        return recorder.record_text(text, identity="x", title="x", length=LENGTH, **{"methods": METHODS} | options)

    with pytest.raises(ValueError, match="use at least 144 tokens"):
        record(20)
    with pytest.raises(ValueError, match="unknown methods"):
        record(LENGTH, methods=["nothing"])
    with pytest.raises(ValueError, match=r"below .* the share of the blocks that are always on"):
        record(LENGTH, budgets=[0.05])
