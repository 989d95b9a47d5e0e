"""The evaluation harness: it measures what it says, resumes, and its statistics are right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.hads import HadsMask
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.fingerprint import digest, fingerprint, knows_runs, shared
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.bootstrap import holm, paired_difference
from xsake.hads.study.divergence import compare
from xsake.hads.study.evaluation import evaluate
from xsake.hads.study.layerwise import run
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.records import Records, read
from xsake.hads.study.summary import layer_division, summarise
from xsake.hads.study.texts import Text, load_texts
from xsake.model import Transformer

PROFILE = case.random_profile(head_dim=16)
LENGTH = 200
TOKENS = np.random.default_rng(0).integers(0, 512, (3, LENGTH)).astype(np.int32)
TEXTS = [Text(f"text {n}", "numbers", tokens) for n, tokens in enumerate(TOKENS)]
ABOUT = {"model": "tiny"}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return case.tiny_model()


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


def test_texts_of_the_calibration_are_refused_shifted_and_in_part(model: Transformer, tmp_path: Path):
    rng = np.random.default_rng(1)
    seen, other = rng.integers(0, 512, (2, 3000)).astype(np.int32)
    known = dataclasses.replace(PROFILE, digests=(fingerprint(seen), "0123456789abcdef"))
    assert shared(other, known.digests) == 0 and not knows_runs(known.digests) and knows_runs(known.digests[:1])
    assert shared(seen[:16], [digest(seen[:16])]) == 1 and shared(seen[1:17], [digest(seen[:16])]) == 0
    assert shared(seen, ()) == 0 and shared(seen[:3], known.digests) == 0
    path = tmp_path / "profile.json"
    known.save(path)
    assert HadsProfile.load(path).digests == known.digests

    mixed = np.concatenate([other[:800], seen[900:1100]])
    for tokens, share in ((seen[37:1037], "100%"), (mixed, "1.%|2.%")):
        with pytest.raises(ValueError, match=rf"calibrated on a text \(({share}) of it\): evaluate on other texts"):
            text = Text("a text", "numbers", tokens)
            evaluate(model, known, [text], methods=["hads"], budgets=[0.6], records=Records(tmp_path / "r", ABOUT))


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


def test_bootstrap_draws_whole_documents():
    """Eight copies of a text say no more than the text."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 50), rng.normal(0.3, 1, 50)
    once, copies = paired_difference(a, b), (np.repeat(x, 8) for x in (a, b))
    many = paired_difference(*copies, [f"document {n // 8}" for n in range(400)])
    assert many.mean == pytest.approx(once.mean)
    assert many.high - many.low == pytest.approx(once.high - once.low, rel=0.05)
    uneven = paired_difference(np.array([1.0, 1.0, 1.0, 5.0]), np.zeros(4), ["a", "a", "a", "b"])
    assert uneven.mean == 2.0 and (uneven.low, uneven.high) == (1.0, 5.0)
    one = paired_difference(a, b, ["a book"] * 50)
    assert (one.low, one.high, one.not_below, one.is_below) == (None, None, 1.0, False)
    with pytest.raises(ValueError, match="each of 50 sequences; got 2 names"):
        paired_difference(a, b, ["x", "y"])


def test_summaries_know_documents_and_both_divisions():
    line = {"density": 0.2, "budget": 0.2, "loss": 2.0, "same_token": 1.0, "layers": "profile"}
    lines = [
        line | {"sequence": str(n), "document": "ab"[n // 3], "method": m, "kl": kl, "sparse_loss": 2.1 - kl}
        for n in range(6)
        for m, kl in (("hads", 0.1), ("other", 0.2 + n))
    ]
    lines += [one | {"layers": "uniform", "kl": 2 * one["kl"]} for one in lines if one["sequence"] == "1"]
    other = next(row for row in summarise(lines) if (row.method, row.layers) == ("other", "profile"))
    assert (other.sequences, other.documents) == (6, 2)
    assert (other.against.low, other.against.high) == (pytest.approx(-4.1), pytest.approx(-1.1))
    assert other.loss_against.mean == pytest.approx(2.6)
    ours = {"method": "hads", "budget": 0.2, "sequences": 1, "profile": 0.1, "uniform": 0.2}
    assert layer_division(lines)[0] == ours


def test_texts_name_their_documents(tmp_path: Path):
    tokens = np.arange(20, dtype=np.uint16).reshape(2, 10)
    np.savez(tmp_path / "a.npz", rfc=tokens, **{"rfc.documents": np.array(["rfc1.txt", "rfc1.txt"])}, code=tokens)
    (tmp_path / "book.txt").write_text("x" * 25)
    found = load_texts([tmp_path / "a.npz", tmp_path / "book.txt"], length=10, encode=lambda text: [1] * len(text))
    named = {"rfc": "rfc/rfc1.txt", "code": None, "book": "book/book.txt"}
    assert [text.document for text in found] == [named[text.domain] for text in found] and len(found) == 6
    np.savez(tmp_path / "b.npz", rfc=tokens, **{"rfc.documents": np.array(["rfc1.txt"])})
    with pytest.raises(ValueError, match=r"rfc\.documents must be 2 names"):
        load_texts([tmp_path / "b.npz"], length=10)


def test_holm():
    np.testing.assert_allclose(holm(np.array([0.04, 0.01, 0.03])), [0.06, 0.03, 0.06])
