"""Damaged checkpoints: one line names the checkpoint and says what to do, and nothing is changed."""

from __future__ import annotations

import os
import shutil

import pytest
from training import make_config, make_data

from xsake.model import load_trained
from xsake.model.training.loop import train

pytestmark = pytest.mark.xdist_group("training")

DAMAGE = {
    "no state": lambda last: shutil.rmtree(last / "state"),
    "no description": lambda last: shutil.rmtree(last / "about"),
    "a description that is no JSON": lambda last: (last / "about" / "metadata").write_text("{"),
    "a description that is a number": lambda last: (last / "about" / "metadata").write_text("5"),
    "a description without a configuration": lambda last: (last / "about" / "metadata").write_text('{"data": {}}'),
    "no list of arrays": lambda last: (last / "state" / "_METADATA").unlink(),
    "no arrays": lambda last: shutil.rmtree(last / "state" / "d"),
    "arrays cut off": lambda last: [os.truncate(path, 50) for path in (last / "state" / "d").iterdir()],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Data, and a run that was stopped after step 3 of 6."""
    folder = tmp_path_factory.mktemp("stopped")
    data = make_data(folder / "data")
    train(make_config(), data=data, run=folder / "run", checkpoint_every=3, quiet=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "6")
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named(stopped, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(stopped / "run", run)
    last = run / "checkpoints" / "3"
    DAMAGE[name](last)
    before = contents(run)
    message = rf"the checkpoint {last} cannot be read: .* Move this folder away"
    for use in (lambda: load_trained(run), lambda: train(make_config(), data=stopped / "data", run=run, quiet=True)):
        with pytest.raises(ValueError, match=message) as said:
            use()
        assert "\n" not in str(said.value)
        assert contents(run) == before


def test_a_checkpoint_of_another_version_is_refused(stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped / "run", run)
    about = run / "checkpoints" / "3" / "about" / "metadata"
    about.write_text(about.read_text().replace('"beta1"', '"gamma"'))
    with pytest.raises(ValueError, match=r"not a training configuration that this xsake knows: .*gamma"):
        load_trained(run)
    with pytest.raises(ValueError, match=r"another configuration: config.beta1 was None and is 0.9"):
        train(make_config(), data=stopped / "data", run=run, quiet=True)
