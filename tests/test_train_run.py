"""Training runs on one device: they learn, they do what their configuration says, and they resume bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import jax
import numpy as np
import pytest
from training import MODEL, events, losses, make_config, make_data

from xsake import patterns
from xsake.hads.selection.mask_function import mask_shape
from xsake.model.training.attention import FixedMask
from xsake.model.training.loop import train
from xsake.model.training.trainer import Trainer
from xsake.model.training.watch.run_file import RunFile, read_events

# One worker for all tests of training: it has their programs.
pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "tokens")


@pytest.mark.slow
def test_every_block_is_dense(data, tmp_path):
    """The same curve with a mask of 100% as with none, to rounding."""
    sparse, dense = (
        losses(train(make_config(attention=name, density=1.0), data=data, run=tmp_path / name, quiet=True))
        for name in ("sink_window", "dense")
    )
    np.testing.assert_allclose(sparse[0], dense[0], rtol=1e-6)
    np.testing.assert_allclose(sparse, dense, rtol=1e-5)  # Adam's first steps are signs: they amplify rounding
    half = losses(train(make_config(), data=data, run=tmp_path / "half", quiet=True))
    assert max(abs(a - b) for a, b in zip(half, dense, strict=True)) > 1e-4  # so that the masks are in use


@pytest.mark.slow
def test_microbatches_give_the_same_steps(data, tmp_path):
    whole, parts = (
        losses(train(make_config(microbatches=m), data=data, run=tmp_path / str(m), quiet=True)) for m in (1, 2)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


def test_stopped_and_carried_on_bit_for_bit(data, tmp_path, monkeypatch):
    """Stopped after a checkpoint, with later steps in the run file, and a line cut off."""
    config = make_config()
    whole = losses(train(config, data=data, run=tmp_path / "whole", checkpoint_every=2, quiet=True))

    class Stop(Exception):
        pass

    write = RunFile.write

    def stop_at_5(self, event, step, **values):
        if step == 5:
            self._file.write('{"event": "step", "st')
            self._file.flush()
            raise Stop
        write(self, event, step, **values)

    run = tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(RunFile, "write", stop_at_5)
        train(config, data=data, run=run, checkpoint_every=2, quiet=True)
    file = train(config, data=data, run=run, checkpoint_every=2, quiet=True)
    assert losses(file) == whole
    assert [event["step"] for event in events(file, "resumed")] == [4]
    assert all(line.startswith("{") and json.loads(line) for line in file.read_text().splitlines())
    before = file.read_bytes()
    assert train(config, data=data, run=run, quiet=True) == file and file.read_bytes() == before  # it is finished


def test_a_run_says_how_it_was_started_and_what_its_heads_keep(data, tmp_path, capsys):
    file = train(make_config(), data=data, run=tmp_path)
    said = "sink_window attention keeps 70% of the blocks (70% asked for, blocks of 16 tokens)"
    assert said in " ".join(capsys.readouterr().out.split())
    (start,), (density,) = events(file, "start"), events(file, "density")
    assert start["process"]["pid"] == os.getpid() and start["environment"]["jax"] == jax.__version__
    assert start["command"] and abs(start["time"] - time.time()) < 600
    mask = Trainer(make_config(), data=data).mask_fn.mask
    assert density["layers"] == [[pytest.approx(float(mask.density()), abs=1e-4)] * 4]


def test_only_the_last_checkpoints_are_kept(data, tmp_path):
    train(make_config(), data=data, run=tmp_path, checkpoint_every=1, keep=2, quiet=True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["5", "6"]


@pytest.mark.slow
def test_recalibration_is_called_logged_and_resumed(data, tmp_path):
    """After the stop, the run uses the masks from before it, though the callback would make others."""
    config = make_config(attention="hads", recalibrate_every=2)
    calls = []

    def recalibrate(step, model, tokens):
        calls.append(step)
        assert model.config == MODEL and tokens.shape == (4, 64)
        mask = patterns.random(
            64, 64, density=0.6, seed=len(calls), block_q=16, block_kv=16, is_causal=True, capacity=10
        )
        return FixedMask(dataclasses.replace(mask, density_hint=None))

    options = dict(data=data, checkpoint_every=3, quiet=True)
    whole = train(config, run=tmp_path / "whole", recalibrate=recalibrate, **options)
    assert calls == [0, 2, 4] and [event["step"] for event in events(whole, "recalibrate")] == [2, 4]

    calls.clear()

    def stops_at_4(step, model, tokens):
        if step == 4:
            raise KeyboardInterrupt
        return recalibrate(step, model, tokens)

    with pytest.raises(KeyboardInterrupt):
        train(config, run=tmp_path / "stopped", recalibrate=stops_at_4, **options)
    assert calls == [0, 2]
    calls += [-1] * 5  # from here on the callback makes other masks
    resumed = train(config, run=tmp_path / "stopped", recalibrate=recalibrate, **options)
    assert calls[-2:] == [3, 4]
    assert losses(resumed)[:4] == losses(whole)[:4]  # step 4 ran with the masks of the checkpoint
    assert losses(resumed)[4:] != losses(whole)[4:]


@pytest.mark.slow
def test_hads_calibrates_itself_in_training(data, tmp_path):
    """Its masks keep exactly the density asked for, its profile changes with the weights, and the model learns."""
    config = make_config(attention="hads", density=0.5, block=4, recalibrate_every=3)
    trainer = Trainer(config, data=data)
    trainer.begin()
    first = trainer.mask_fn
    shape = mask_shape(budget=0.5, block=4, length=64, layers=1, q_heads=4, kv_heads=2, head_dim=16)
    assert jax.tree.structure(shape) == jax.tree.structure(first)
    pairs = zip(jax.tree.leaves(shape), jax.tree.leaves(first), strict=True)
    assert all((a.shape, a.dtype, False) == (b.shape, b.dtype, b.weak_type) for a, b in pairs)
    query, key = (jax.random.normal(jax.random.key(n), (2, 64, h, 16)) for n, h in enumerate((4, 2)))
    active = np.asarray(first(0, query, key).to_blocks()).sum((1, 2, 3))
    assert active.tolist() == [round(0.5 * 4 * 136)] * 2

    file = train(config, data=data, run=tmp_path / "hads", quiet=True)
    dense = train(make_config(attention="dense", density=1.0), data=data, run=tmp_path / "dense", quiet=True)
    (event,) = events(file, "recalibrate")
    assert event["step"] == 3 and event["seconds"] > 0
    densities = events(file, "density")
    assert [event["step"] for event in densities] == [0, 3] and not events(dense, "density")
    assert np.shape(densities[0]["layers"]) == (1, 4)
    np.testing.assert_allclose([np.mean(event["layers"]) for event in densities], 0.5, atol=1e-4)
    np.testing.assert_allclose(losses(file), losses(dense), rtol=0.02)
    assert losses(file) != losses(dense)


@pytest.mark.slow
def test_a_plain_function_may_be_a_mask_function(data, tmp_path):
    config = make_config(attention="hads")
    mask = patterns.causal(64, 64, block_q=16, block_kv=16)
    file = train(config, data=data, run=tmp_path, quiet=True, recalibrate=lambda *_: lambda layer, query, key: mask)
    dense = train(make_config(attention="dense", density=1.0), data=data, run=tmp_path / "d", quiet=True)
    np.testing.assert_allclose(losses(file)[0], losses(dense)[0], rtol=1e-6)


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, monkeypatch):
    begin = Trainer.begin

    def spoilt(self):
        begin(self)
        self.state = dataclasses.replace(self.state, params=jax.tree.map(nan, self.state.params))

    def nan(x):
        return jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding)

    monkeypatch.setattr(Trainer, "begin", spoilt)
    with pytest.raises(FloatingPointError, match=r"at step 1; earlier checkpoints are kept"):
        train(make_config(), data=data, run=tmp_path, quiet=True)
    (failed,) = events(tmp_path / "metrics.jsonl", "failed")
    assert "earlier checkpoints are kept" in failed["reason"]


def test_wrong_runs_change_nothing(data, tmp_path, unchecked_annotations):
    run = tmp_path / "run"
    train(make_config(), data=data, run=run, quiet=True)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def refused(error, message, *, data=data, run=run, config=None, **options):
        with pytest.raises(error, match=message):
            train(config or make_config(), data=data, run=run, quiet=True, **options)

    refused(ValueError, r"another configuration: config.seed was 0 and is 1", config=make_config(seed=1))
    wider = dataclasses.replace(MODEL, mlp_width=64)
    refused(ValueError, r"config.model.mlp_width was 192 and is 64", config=make_config(model=wider))
    other = make_data(tmp_path / "other", vocab_size=100)
    refused(ValueError, "does not fit the model's vocab_size=64", config=make_config(model=_vocabulary(64)))
    (other / "train-00001.tokens").write_bytes((other / "train-00000.tokens").read_bytes()[:-7])
    refused(ValueError, r"train-00001.tokens is truncated", data=other)
    refused(ValueError, "batch=4 in microbatches=1 cannot be divided over the mesh's data=8", mesh=(8, 1))
    refused(ValueError, "kv_heads=2 cannot be divided over the mesh's model=4", mesh=(2, 4))
    refused(ValueError, "most of them always on: use at least 144 tokens", config=make_config(attention="hads"))
    refused(ValueError, "checkpoint_every=0", checkpoint_every=0)
    refused(ValueError, "batch of 4. Hold out more", config=make_config(length=400, microbatches=4), eval_every=1)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_began_without_a_checkpoint_is_refused_to_another(data, tmp_path):
    run = tmp_path / "run"
    train(make_config(), data=data, run=run, quiet=True)
    for path in (run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)  # as if it had been killed before the first
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"config.seed was 0 and is 1"):
        train(make_config(seed=1), data=data, run=run, quiet=True)
    assert (run / "metrics.jsonl").read_bytes() == before
    again = losses(train(make_config(), data=data, run=run, quiet=True))
    assert again == [json.loads(line)["loss"] for line in before.splitlines() if b'"step", ' in line]


def _vocabulary(size):
    return dataclasses.replace(MODEL, vocab_size=size)


def test_the_run_file_drops_what_a_checkpoint_does_not_know(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunFile(path, step=0) as file:
        file.write("start", 0)
        for step in (1, 2, 3):
            file.write("step", step, loss=step / 3)
    with open(path, "a") as file:
        file.write('{"event": "st')
    with RunFile(path, step=2) as file:
        file.write("step", 3, loss=9.0)
    assert [(event["event"], event["step"]) for event in read_events(path)] == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("resumed", 2),
        ("step", 3),
    ]
    assert read_events(path)[2]["loss"] == 2 / 3 and read_events(tmp_path / "none") == []
    with open(path, "a") as file:
        file.write(f'5\n[1]\nnull\n{{}}\n{{"event": "x", "step": "2"}}\n{"[" * 100_000}\n')
    assert len(read_events(path)) == 5, "what is no event is passed over"
    with RunFile(path, step=0):  # nothing was checkpointed: from the beginning
        assert read_events(path) == []


def test_progress_is_printed_where_there_is_no_terminal(data, tmp_path, capsys):
    train(make_config(), data=data, run=tmp_path, eval_every=6)
    printed = capsys.readouterr().out
    assert "step 6/6 loss" in printed and "tokens/s" in printed and "eval" in printed
    assert "MFU" not in printed or jax.devices()[0].platform != "cpu"
