"""Damaged checkpoints: one line names the checkpoint and says what to do, and nothing is changed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_process import environment
from training import losses, make_config, make_data

from xsake.model import load_trained
from xsake.model.training.checksums import checksums
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
    "the largest part gone": lambda last: parts(last)[0].unlink(),
    "the largest part cut off": lambda last: os.truncate(parts(last)[0], 50),
    "another seed": lambda last: change_about(last, lambda about: about["config"].update(seed=1)),
    "another checksum": lambda last: change_about(last, lambda about: about["checksums"]["state"].update(step=1)),
    "checksums of nothing": lambda last: change_about(last, lambda about: about["checksums"].update(state={})),
    "checksums under another name": lambda last: change_about(last, lambda a: a.update(sums=a.pop("checksums"))),
}


def parts(checkpoint):
    """The files of the arrays, the largest first."""
    files = (checkpoint / "state" / "ocdbt.process_0" / "d").iterdir()
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))


def change_about(checkpoint, change):
    path = checkpoint / "about" / "metadata"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


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
    message = rf"the checkpoint {last} cannot be read: .* Move this folder away, and the run begins anew: mv {last}"
    for use in (lambda: load_trained(run), lambda: train(make_config(), data=stopped / "data", run=run, quiet=True)):
        with pytest.raises(ValueError, match=message) as said:
            use()
        assert "\n" not in str(said.value) and "bound method" not in str(said.value) and len(str(said.value)) < 700
        assert contents(run) == before


def test_a_checkpoint_of_another_version_is_refused(stopped, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped / "run", run)
    change_about(run / "checkpoints" / "3", lambda about: about["config"].update(gamma=about["config"].pop("beta1")))
    change_about(run / "checkpoints" / "3", lambda about: about.pop("checksums"))
    with pytest.raises(ValueError, match=r"not a training configuration that this xsake knows: .*gamma"):
        load_trained(run)
    with pytest.raises(ValueError, match=r"another configuration: config.beta1 was None and is 0.9"):
        train(make_config(), data=stopped / "data", run=run, quiet=True)


def test_flipped_bits_are_never_trained_on(stopped, tmp_path):
    """A bit of a checkpoint's arrays either changes nothing that is restored, or is told of."""
    run = tmp_path / "run"
    shutil.copytree(stopped / "run", run)
    true = jax.tree.leaves(load_trained(run))
    rng, told = np.random.default_rng(0), []
    for path in parts(run / "checkpoints" / "3")[:2] * 3:
        before = path.read_bytes()
        flip(path, int(rng.integers(len(before))), int(rng.integers(8)))
        try:
            jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(load_trained(run)), true)
        except ValueError as error:
            told.append(str(error))
        path.write_bytes(before)
    assert any("1 of 36 arrays are not what was saved, such as " in one for one in told), told


def test_the_command_of_the_message_goes_on_from_the_checkpoint_before(tmp_path):
    data, run = make_data(tmp_path / "data"), tmp_path / "a run"
    file = train(make_config(), data=data, run=run, checkpoint_every=3, quiet=True)
    whole, last = losses(file), run / "checkpoints" / "6"
    flip(parts(last)[0], 20_000, 3)
    with pytest.raises(ValueError, match="goes on from the checkpoint before it, of step 3: mv ") as said:
        load_trained(run)
    subprocess.run(shlex.split(str(said.value).rpartition(": ")[2]), check=True)
    assert (run / "damaged-6").is_dir() and not last.exists()
    assert losses(train(make_config(), data=data, run=run, checkpoint_every=3, quiet=True)) == whole
    load_trained(run)


def test_a_checkpoint_without_checksums_is_restored_and_that_is_said(stopped, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(stopped / "run", run)
    true = load_trained(run)
    assert not caplog.records
    change_about(run / "checkpoints" / "3", lambda about: about.pop("checksums"))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(load_trained(run)), jax.tree.leaves(true))
    (record,) = caplog.records
    assert record.getMessage() == f"{run / 'checkpoints' / '3'} was saved without checksums: its state is not checked"


def test_checksums_are_those_of_one_device_on_any_mesh():
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    n = 4 * jax.device_count()
    tree = {
        "float32": np.linspace(0, 1, n * 3, dtype=np.float32).reshape(n, 3),
        "bfloat16": jnp.linspace(0, 1, n, dtype=jnp.bfloat16),
        "bool": np.arange(n) % 3 == 0,
        "complex64": np.exp(1j * np.arange(n)).astype(np.complex64),
        "nan": np.full(n, np.nan, np.float32),
    }
    sums = checksums(tree)
    assert sums == checksums(jax.device_put(tree, where)) and len(set(sums.values())) == len(tree)
    for name, array in tree.items():
        swapped = np.asarray(array).copy()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert (checksums({name: swapped})[name] == sums[name]) == (name == "nan")
    assert checksums({"nan": -tree["nan"]})["nan"] != sums["nan"]


_DISK_FULL = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from xsake.model.training.checkpoints import Checkpoints
trees = {"state": {str(n): np.random.default_rng(n).random(30_000) for n in range(8)}}
like = {name: jnp.zeros(30_000) for name in trees["state"]}
about = {"config": {}, "data": {}}
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    checkpoints.save(1, trees, about)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))
try:
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
        checkpoints.save(2, trees, about)
except ValueError as error:
    print(error)
for path in Path(sys.argv[1], "1", "state").rglob("d/*"):
    path.write_bytes(b"")
with Checkpoints(Path(sys.argv[1]), read_only=True) as checkpoints:
    try:
        checkpoints.restore(1, "state", like)
    except ValueError as error:
        print(error)
"""


def test_a_full_disk_and_a_damaged_checkpoint_print_no_traceback(tmp_path):
    """Orbax's threads print theirs; the file system that is full is played by a limit on the size of files."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", _DISK_FULL, str(folder)],
        env=os.environ | environment(1),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, "")
    full, damaged = done.stdout.splitlines()
    mended = "When that is mended, the same command goes on from step 1"
    assert full == f"no checkpoint could be written to {folder}: File too large. {mended}"
    assert damaged.startswith(f"the checkpoint {folder / '1'} cannot be read: ")
