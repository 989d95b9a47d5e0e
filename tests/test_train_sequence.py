"""Sequences cut over devices: training on data x model x sequence gives the losses of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from training import MODEL, losses, make_config, make_data

from xsake.model.network.attend import Attend
from xsake.model.network.cache import KVCache
from xsake.model.network.sequence_cut import SequenceCut
from xsake.model.network.sharding import make_mesh
from xsake.model.network.transformer import Transformer
from xsake.model.training.loop import train
from xsake.model.training.trainer import Trainer

pytestmark = [
    pytest.mark.xdist_group("training"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated"),
]
LONG = dict(length=256, batch=8, steps=20)  # in zigzag on 8 devices: 16 pieces of one block


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("sequence") / "data")


def steps(config, data, count, **options):
    trainer = Trainer(config, data=data, **options)
    trainer.begin()
    return [float(trainer.step()["loss"]) for _ in range(count)], trainer


def test_a_cut_sequence_gives_the_losses_of_one_device(data):
    """In zigzag without being asked, since the length allows it."""
    config = make_config()
    expected, _ = steps(config, data, 2)
    found, trainer = steps(config, data, 2, mesh=(1, 2, 2))
    assert trainer.program.order == "zigzag"
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


VARIANTS = {
    "sink_window": dict(),
    "dense": dict(attention="dense", density=1.0),
    "big_bird, microbatches": dict(attention="big_bird", density=0.9, microbatches=2),
    "dense, bfloat16, remat": dict(attention="dense", density=1.0, dtype="bfloat16", remat=True),
}
CASES = [
    ("sink_window", (8, 1, 1), {}),
    ("sink_window", (2, 2, 2), {}),
    ("sink_window", (2, 2, 2), dict(exchange="gather", order="contiguous", fsdp=True)),
    ("sink_window", (1, 1, 8), dict(exchange="gather")),
    ("sink_window", (1, 1, 8), dict(exchange="ring")),
    ("sink_window", (1, 1, 8), dict(exchange="sparse")),
    ("dense", (2, 2, 2), dict(exchange="ring")),
    ("dense", (1, 1, 8), dict(exchange="ring", order="contiguous", fsdp=True)),
    ("big_bird, microbatches", (1, 2, 4), {}),
    ("dense, bfloat16, remat", (2, 2, 2), dict(exchange="ring")),
]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    found = {}

    def run(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("alone")
            found[name] = losses(train(make_config(**LONG | VARIANTS[name]), data=data, run=folder, quiet=True))
        return found[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), CASES, ids=str)
def test_twenty_steps_on_every_mesh(data, tmp_path, alone, name, mesh, options):
    config = make_config(**LONG | VARIANTS[name])
    found = losses(train(config, data=data, run=tmp_path, mesh=mesh, quiet=True, **options))
    np.testing.assert_allclose(found, alone(name), atol=0.05 if config.dtype == "bfloat16" else 1e-4, rtol=0)
    assert len(found) == 20 and found[-1] < found[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_hads_chooses_from_the_whole_sequence(data, tmp_path, order):
    config = make_config(**LONG | dict(attention="hads", density=0.5, recalibrate_every=10))
    expected = losses(train(config, data=data, run=tmp_path / "one", quiet=True))
    options = dict(mesh=(2, 2, 2), order=order, exchange="ring")
    found = losses(train(config, data=data, run=tmp_path / "cut", quiet=True, **options))
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)  # a block at the edge of the budget may change


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 5)])
def test_a_zigzag_is_undone_piece_by_piece(shape):
    cut = SequenceCut.of(make_mesh(*shape), "zigzag", "auto")
    x = np.arange(2 * 20 * 2, dtype=np.int32).reshape(2, 20, 2, 1)
    move = jax.jit(cut.natural)
    moved = move(cut.lay(x))
    np.testing.assert_array_equal(moved, x)
    assert moved.addressable_shards[0].data.shape[1] == 20 // shape[2]
    assert "all-gather" not in move.lower(cut.lay(x)).compile().as_text()


def test_a_model_says_what_cannot_be_cut():
    mesh, model = make_mesh(1, 1, 2), nnx.eval_shape(lambda: Transformer(MODEL, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="3 tokens cannot be divided over the mesh's sequence=2"):
        model(np.zeros((1, 3), np.int32), mesh=mesh)
    with pytest.raises(ValueError, match="a cache cannot be used with a mesh that cuts sequences"):
        model(np.zeros((1, 4), np.int32), cache=KVCache.empty(MODEL, batch=1, capacity=8), mesh=mesh)
    with pytest.raises(ValueError, match="order='spiral' must be one of"):
        model(np.zeros((1, 4), np.int32), mesh=mesh, order="spiral")
    with pytest.raises(ValueError, match=r"which xsake\.attention can serve, and this model's attention_fn is"):
        Attend(attention_fn=jax.nn.dot_product_attention, cut=SequenceCut.of(mesh, "zigzag", "auto"))


def test_what_cannot_be_cut_is_said(data, monkeypatch):
    def refused(message, mesh=(1, 1, 2), order=None, exchange="auto", **changes):
        with pytest.raises(ValueError, match=message):
            Trainer(make_config(**changes), data=data, mesh=mesh, order=order, exchange=exchange)

    monkeypatch.setattr("xsake.model.training.trainer.check_cudnn", lambda config: None)
    refused(r"use a multiple of 64 tokens \(2 x 2 pieces of whole blocks of 16\)", length=96, order="zigzag")
    refused(r"use attention=\"dense\"", attention="cudnn", density=1.0, dtype="bfloat16")
    refused("needs masks that are known", exchange="sparse", attention="hads", length=256)
    refused(r"mesh=\(1, 1, 1, 1\) must be \(data, model\) or \(data, model, sequence\)", mesh=(1, 1, 1, 1))
    assert Trainer(make_config(length=96), data=data, mesh=(1, 1, 2)).program.order == "contiguous"
