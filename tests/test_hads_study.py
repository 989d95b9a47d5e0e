"""The evaluation harness: it measures what it says, resumes, and its statistics are right."""

from __future__ import annotations

import json
from pathlib import Path

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.hads import HadsMask
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.study.bootstrap import holm, paired_difference
from xsake.hads.study.divergence import compare
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.layerwise import run
from xsake.hads.study.method_mask import MethodMask
from xsake.hads.study.records import Records, read
from xsake.hads.study.summary import summarise
from xsake.hads.study.texts import Text
from xsake.model import PRESETS, Transformer

PROFILE = case.random_profile(head_dim=16)
LENGTH = 200
TOKENS = np.random.default_rng(0).integers(0, 512, (3, LENGTH)).astype(np.int32)
TEXTS = [Text(f"text {n}", "numbers", tokens) for n, tokens in enumerate(TOKENS)]
ABOUT = {"model": "tiny"}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.mark.slow
def test_layerwise_is_the_model(model: Transformer):
    tokens = jnp.asarray(TOKENS[:2])
    layers = Layers(model)
    dense, none = run(layers, tokens)
    np.testing.assert_allclose(dense, jax.jit(model.hidden)(tokens), rtol=1e-4, atol=1e-5)
    assert none is None
    profile = jax.tree.map(jnp.asarray, PROFILE)
    ours = HadsMask.of(profile, 0.6, LENGTH, transpose=False)
    sparse, active = run(layers, tokens, MethodMask.of("hads", profile, ours.counts))
    np.testing.assert_allclose(sparse, model.hidden(tokens, mask_fn=ours), rtol=1e-3, atol=1e-4)
    assert active.shape == (2, 2, 4) and active.sum(-1).tolist() == [[int(count)] * 2 for count in ours.counts]


def test_comparison_is_that_of_whole_logits(model: Transformer):
    tokens = jnp.asarray(TOKENS)
    states, other = (jax.random.normal(jax.random.key(n), (3, LENGTH, 64)) for n in range(2))
    got = compare(model, states, other, tokens, chunk=128)
    first, second = (np.asarray(jax.nn.log_softmax(model.logits(s)), np.float64) for s in (states, other))
    np.testing.assert_allclose(got.divergence, (np.exp(first) * (first - second)).sum(-1), rtol=1e-3, atol=1e-6)
    for loss, log_p in ((got.loss, first), (got.other_loss, second)):
        wanted = -np.take_along_axis(log_p[:, :-1], TOKENS[:, 1:, None], 2)[..., 0]
        np.testing.assert_allclose(loss[:, :-1], wanted, rtol=1e-4, atol=1e-5)
        assert (loss[:, -1] == 0).all()
    assert (np.asarray(got.same) == (first.argmax(-1) == second.argmax(-1))).all()
    for right, log_p in ((got.right, first), (got.other_right, second)):
        assert (np.asarray(right)[:, :-1] == (log_p.argmax(-1)[:, :-1] == TOKENS[:, 1:])).all() and not right[
            :, -1
        ].any()


@pytest.mark.slow
def test_evaluation_records_each_sequence_and_goes_on_where_it_stopped(model: Transformer, tmp_path: Path):
    path = tmp_path / "records.jsonl"
    options = dict(methods=["hads", "sink_window"], budgets=[0.6, 1.0], batch=2)
    told: list[str] = []

    def run(texts: list[Text], **more) -> Records:
        records = Records(path, ABOUT)
        evaluate(model, PROFILE, texts, records=records, progress=lambda what, *_: told.append(what), **options | more)
        return records

    assert len(run(TEXTS[:2])) == 8
    path.write_text(path.read_text() + '{"sequence": "text 2", "meth')  # cut off
    told.clear()
    records = run(TEXTS)
    assert len(records) == 12
    assert told == ["dense", "hads at 60%", "sink_window at 60%", "hads at 100%", "sink_window at 100%"]
    about, lines = read(path)
    assert about == ABOUT and lines == list(records)
    n = -(-LENGTH // 16)
    for line in lines:
        assert abs(line["density"] - line["budget"]) <= 0.5 / (8 * n * (n + 1) / 2) + 1e-9
        assert line["digest"] == TEXTS[int(line["sequence"][-1])].digest and len(line["kl_quarters"]) == 4
        assert abs(line["kl"]) < 1e-6 if line["budget"] == 1 else 0 < line["kl"] < line["kl_p99"]
        if line["budget"] == 1:
            assert line["sparse_loss"] == pytest.approx(line["loss"], abs=1e-5) and line["same_token"] > 0.99
    dense = jax.nn.log_softmax(model(jnp.asarray(TOKENS[:1])))[0]
    loss = -np.take_along_axis(np.asarray(dense[:-1]), TOKENS[0, 1:, None], 1).mean()
    assert lines[0]["sequence"] == "text 0" and lines[0]["loss"] == pytest.approx(float(loss), rel=1e-4)

    rows = {(row.method, row.budget): row for row in summarise(lines)}
    assert rows["hads", 0.6].against is None and rows["hads", 0.6].sequences == 3
    ours, theirs = ([x["kl"] for x in lines if (x["method"], x["budget"]) == (m, 0.6)] for m in ("hads", "sink_window"))
    assert rows["sink_window", 0.6].against.mean == pytest.approx(np.mean(ours) - np.mean(theirs))

    with pytest.raises(ValueError, match=r"holds a run of {'model': 'tiny'}, not of {'model': 'other'}"):
        Records(path, {"model": "other"})
    with pytest.raises(ValueError, match=r"unknown methods \['nonsense'\]; there are hads, "):
        run(TEXTS, methods=["nonsense"])
    with pytest.raises(ValueError, match=r"one length; got \[100, 200\]"):
        run([*TEXTS, Text("short", "numbers", TOKENS[0, :100])])
    with pytest.raises(ValueError, match='must be "profile" or "uniform"'):
        run(TEXTS, layers="equal")


def test_damaged_records(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"about": ABOUT}) + "\nnot json\n" + json.dumps({"sequence": 1}) + "\n")
    with pytest.raises(ValueError, match="line 2 is damaged"):
        Records(path, ABOUT)
    path.write_text(json.dumps({"sequence": 1}) + "\n")
    with pytest.raises(ValueError, match="does not say what it is about"):
        read(path)


def test_bootstrap_interval_is_that_of_a_mean():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 400), rng.normal(0.1, 1, 400)
    got = paired_difference(a, b)
    error = (a - b).std(ddof=1) / 20
    assert got.mean == pytest.approx((a - b).mean())
    assert got.low == pytest.approx((a - b).mean() - 1.96 * error, abs=0.1 * error)
    assert got.high == pytest.approx((a - b).mean() + 1.96 * error, abs=0.1 * error)
    assert paired_difference(a, a + 1) == (pytest.approx(-1), pytest.approx(-1), pytest.approx(-1), 0.0)
    with pytest.raises(ValueError, match=r"got shapes \(400,\) and \(3,\)"):
        paired_difference(a, b[:3])


def test_holm():
    np.testing.assert_allclose(holm(np.array([0.04, 0.01, 0.03])), [0.06, 0.03, 0.06])
