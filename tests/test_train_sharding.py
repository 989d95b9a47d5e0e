"""Several devices: rules that fit the model, the same losses as on one, and runs that move between meshes."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from training import MODEL, losses, make_config, make_data

from xsake.model.network.config import PRESETS
from xsake.model.network.sharding import RULES, make_mesh, parameter_name, parameter_shardings
from xsake.model.network.transformer import Transformer
from xsake.model.training.loop import train
from xsake.model.training.trainer import Trainer

pytestmark = pytest.mark.xdist_group("training")
needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")


def abstract(config):
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def names(params):
    return [parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def test_every_rule_matches_something_and_every_parameter_one_rule():
    untied = dataclasses.replace(PRESETS["tiny"], tied=False, qkv_bias=True, qk_norm=True)
    found = [name for config in (PRESETS["tiny"], untied) for name in names(abstract(config))]
    for pattern, _ in RULES:
        assert any(re.fullmatch(pattern, name) for name in found), f"{pattern} matches no parameter"
    for name in found:
        assert sum(bool(re.fullmatch(pattern, name)) for pattern, _ in RULES) == 1, name


@needs_8
def test_where_parameters_lie():
    placed = parameter_shardings(abstract(MODEL), make_mesh(4, 2))
    block = placed["blocks"][0]
    assert block["attention"]["query"]["kernel"].spec == P(None, "model")
    assert block["mlp"]["down"]["kernel"].spec == P("model", None)
    assert placed["norm"]["scale"].spec == P(None)
    split = parameter_shardings(abstract(MODEL), make_mesh(4, 2), fsdp=True)
    assert split["blocks"][0]["mlp"]["down"]["kernel"].spec == P("model", "data")
    assert split["embed"]["embedding"].spec == P("model", "data") and split["norm"]["scale"].spec == P("data")


@needs_8
def test_wrong_rules_and_sizes():
    with pytest.raises(ValueError, match=r"no sharding rule matches parameter 'adapter/kernel' of shape \(4, 4\)"):
        parameter_shardings({"adapter": {"kernel": np.zeros((4, 4))}}, make_mesh())
    with pytest.raises(ValueError, match=r"'embed/embedding': 127 cannot be divided over the mesh's model=2"):
        parameter_shardings({"embed": {"embedding": np.zeros((127, 4))}}, make_mesh(1, 2))


@needs_8
@pytest.mark.slow  # test_a_run_is_carried_on_with_another_mesh compares the losses, too
@pytest.mark.parametrize("fsdp", [False, True])
def test_eight_devices_give_the_losses_of_one(tmp_path, fsdp):
    data = make_data(tmp_path / "data")
    one = losses(train(make_config(), data=data, run=tmp_path / "one", quiet=True))
    run = tmp_path / "eight"
    eight = losses(train(make_config(), data=data, run=run, mesh=(4, 2), fsdp=fsdp, quiet=True))
    np.testing.assert_allclose(one, eight, atol=1e-5, rtol=0)


@needs_8
@pytest.mark.slow  # test_train_sequence trains on eight devices
def test_state_is_split_as_the_rules_say(tmp_path):
    """Weights and both of Adam's moments: with fsdp, an eighth of each matrix on every device."""
    trainer = Trainer(make_config(), data=make_data(tmp_path / "data"), mesh=(4, 2), fsdp=True)
    trainer.begin()
    old = trainer.state
    trainer.step()
    assert all(x.is_deleted() for x in jax.tree.leaves(old.params))  # its memory is the new state's
    matrices = [x for x in jax.tree.leaves(trainer.state) if x.ndim == 2]
    assert len(matrices) == 3 * (7 * MODEL.layers + 1)
    for x in matrices:
        assert x.addressable_shards[0].data.size * 8 == x.size, x.sharding


@pytest.mark.slow
@needs_8
def test_a_run_is_carried_on_with_another_mesh(tmp_path, monkeypatch):
    data, run = make_data(tmp_path / "data"), tmp_path / "run"
    whole = losses(train(make_config(), data=data, run=tmp_path / "whole", quiet=True))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "evaluate", _interrupt)
        train(make_config(), data=data, run=run, mesh=(4, 2), checkpoint_every=2, eval_every=5, quiet=True)
    moved = losses(train(make_config(), data=data, run=run, checkpoint_every=2, quiet=True))
    np.testing.assert_allclose(moved, whole, atol=1e-5, rtol=0)


def _interrupt(*_):
    raise KeyboardInterrupt
