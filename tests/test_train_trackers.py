"""`train(track=...)`: what trackers wrote is read back, and a tracker that fails does not stop the run.

Weights & Biases, Trackio and TensorBoard's own reader are large: `make test-trackers` installs them.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import sys

import pytest
from training import events, losses, make_config, make_data

from xsake.model.training.loop import train
from xsake.model.training.watch import trackers

pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "tokens")


def test_tensorboard_files_are_read_back(data, tmp_path):
    """By the format's own framing; the next test uses TensorBoard's reader."""
    from tensorboardX.proto.event_pb2 import Event

    file = train(make_config(), data=data, run=tmp_path, track=["tensorboard"], quiet=True)
    found: dict[str, dict[int, float]] = {}
    for path in (tmp_path / "tensorboard").glob("events.out.tfevents.*"):
        raw = path.read_bytes()
        at = 0
        while at < len(raw):
            (size,) = struct.unpack_from("<Q", raw, at)
            event = Event.FromString(raw[at + 12 : at + 12 + size])
            at += 12 + size + 4
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert [found["step/loss"][step] for step in range(1, 7)] == pytest.approx(losses(file), rel=1e-6)
    (density,) = events(file, "density")
    assert found["density/mean"][0] == pytest.approx(density["layers"][0][0], abs=1e-4)


def test_tensorboard_reads_its_files(data, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make test-trackers")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = train(make_config(), data=data, run=tmp_path, track=["tensorboard"], quiet=True)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [point.value for point in read.Scalars("step/loss")] == pytest.approx(losses(file), rel=1e-6)
    assert [point.step for point in read.Scalars("step/loss")] == list(range(1, 7))


def records_of(data: bytes) -> list[bytes]:
    """The records of a .wandb file: after 7 bytes, LevelDB's log format in blocks of 32 kB."""
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(part)
            part = b""
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_weights_and_biases_offline(data, tmp_path, monkeypatch):
    """No key: one warning, events on disk, and the file read back with wandb's own messages."""
    pytest.importorskip("wandb", reason="wandb is not installed: make test-trackers")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    with pytest.warns(UserWarning, match="wandb has no key") as told:
        file = train(make_config(), data=data, run=tmp_path / "run", track=["wandb"], quiet=True)
    assert len([one for one in told if "wandb" in str(one.message)]) == 1
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    logged = []
    for raw in records_of(path.read_bytes()):
        record = Record.FromString(raw)
        items = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        if "step/loss" in items:
            logged.append(json.loads(items["step/loss"]))
    assert logged == losses(file)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
def test_trackio_is_read_back(data, tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: make test-trackers")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which trackio reads when it is imported
    file = train(make_config(), data=data, run=tmp_path / "run", track=["trackio"], quiet=True)
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(trackers.PROJECT, "run")
    assert [row["step/loss"] for row in rows if "step/loss" in row] == pytest.approx(losses(file))


def test_a_tracker_that_fails_is_left_out_with_one_warning(data, tmp_path, monkeypatch):
    class Broken:
        def __init__(self, run, config, start):
            self.logged = 0

        def log(self, values, step):
            self.logged += 1
            raise ConnectionError("no network\nand many more lines")

        def close(self):
            raise AssertionError("it was left out")

    monkeypatch.setitem(trackers._MAKERS, "tensorboard", Broken)
    with pytest.warns(UserWarning, match="tensorboard is left out, and training goes on: no network$") as told:
        file = train(make_config(), data=data, run=tmp_path, track=["tensorboard"], quiet=True)
    assert len(losses(file)) == 6 and len([one for one in told if "left out" in str(one.message)]) == 1


def test_wrong_trackers_are_refused_before_anything_is_written(data, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="track='mlflow' must be one of wandb, tensorboard, trackio"):
        train(make_config(), data=data, run=tmp_path / "run", track=["mlflow"], quiet=True)
    monkeypatch.setitem(trackers.PACKAGES, "wandb", "wandb_that_is_not_there")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"not installed: pip install wandb"):
        train(make_config(), data=data, run=tmp_path / "run", track=["wandb"], quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
