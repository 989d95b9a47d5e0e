"""Damaged files of every kind that people pass on: refused in one plain line or used, soon and in little memory."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import hads_case
import jax
import numpy as np
import pytest
from dashboard_server import library_of, step_line, write_run

import xsake
from xsake import BlockMask
from xsake.dashboard.read.line_reader import Place
from xsake.dashboard.serve import metrics_page
from xsake.dashboard.serve.live import Follower, Live
from xsake.dashboard.show import run_documents
from xsake.hads import HadsProfile

SECONDS, BYTES = 2.0, 128 << 20  # of the processor, which a busy machine does not lengthen

# -- damage --------------------------------------------------------------------------------------------------------

VALUES = [
    *b"null true -1 0 1 2 0.5 -0.0 5e-324 1e303 1e308 -1e308 1e999 NaN -Infinity [] {} [[]] [null] [1,2]".split(),
    *b'2147483647 2147483648 -2147483649 "" "5" "\\ud800" "\\u0000\\n" "\xff" [1,"a"] {"a":1}'.split(),
    *(
        b"9223372036854775808",
        b"1" + b"0" * 30,
        b"1" + b"0" * 400,
        b"1" * 5000,
        b'"' + b"x" * 9000 + b'"',
        b"[" * 10**5,
        b"[" * 900 + b"]" * 900,
    ),
]
ATOM = re.compile(rb'"[^"\n]*"|[-+.\w]+')
NAME = re.compile(rb'"[^"\n]*": ')
VALUE = rb'"[^"\n]*"|[-+.\w]+|\[[^][\n]*\]'
GROUP = re.compile(rb"\[[^][\n]*\]|\{[^{}\n]*\}")


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped, lost, doubled or foreign bytes."""
    at, size = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 16, 256])
    part = data[at : at + size]
    new = rng.choice([bytes(b ^ 1 << rng.randrange(8) for b in part), b"", 2 * part, bytes(size), rng.randbytes(size)])
    return data[:at] + new + data[at + len(part) :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def in_values(rng: random.Random, text: bytes) -> bytes:
    """Another value, or another name, in JSON."""
    found = list(rng.choice([ATOM, ATOM, GROUP]).finditer(text))
    if not found:
        return text
    chosen = rng.choice(found)
    return text[: chosen.start()] + rng.choice(VALUES) + text[chosen.end() :]


def in_field(rng: random.Random, text: bytes) -> bytes:
    """Another value in JSON for every field of one name."""
    names = sorted(set(NAME.findall(text)))
    value = rng.choice(VALUES)
    return (
        re.sub(b"(" + re.escape(rng.choice(names)) + rb")(" + VALUE + b")", lambda found: found[1] + value, text)
        if names
        else text
    )


def in_lines(rng: random.Random, text: bytes) -> bytes:
    """Lines that are lost, doubled or in another order."""
    lines = text.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a : a + 1] = rng.choice([[], [lines[a]] * 2, [lines[b]], [lines[a] + lines[b]]])
    return b"\n".join(lines)


def in_array(rng: random.Random, stored: bytes) -> bytes:
    """Another array of NumPy: other entries, another dtype or shape."""
    array = np.load(io.BytesIO(stored))
    if rng.random() < 0.6 and array.size and array.dtype.kind in "iu":
        array = array.copy()
        entries = array.reshape(-1)
        limits = np.iinfo(array.dtype)
        value = rng.choice([limits.min, limits.max, 0, 1, 2, 3, 5, 100, int(entries[0]), int(entries[-1])])
        entries[rng.randrange(array.size)] = value
    else:
        change = rng.choice(
            [
                lambda x: x.astype(rng.choice(["?", "i1", "u8", ">i4", "f2", "f8", "c16", "U3", "S7", "V5", "i4, f8"])),
                lambda x: x.reshape(rng.choice([(-1,), (1, -1), (*x.shape, 1), (-1, 1, 1)])),
                lambda x: x.T,
                lambda x: x[..., :0],
                lambda x: x[..., ::-1],
                lambda x: x[..., : rng.randrange(x.shape[-1] + 1)] if x.ndim else x,
                lambda x: np.repeat(x, rng.choice([2, 3, 50]), rng.randrange(x.ndim)) if x.ndim else x,
                lambda x: np.zeros(1 << 22, np.int8),
                lambda x: np.array(7),
            ]
        )
        with np.errstate(all="ignore"):
            array = change(array) if array.dtype.kind in "iu" else change(np.arange(6))
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def in_archive(rng: random.Random, data: bytes) -> bytes:
    """Damage below the checksums of an archive: in the text of its header, in an array, in the bytes of a member."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = rng.randrange(len(members)) if rng.random() < 0.7 else 0  # the header is the first
    name, stored = members[at]
    change = rng.choice([in_array, in_bytes, cut, in_values])
    if name == "header.npy" and change is not in_bytes:
        text = in_values(rng, str(np.load(io.BytesIO(stored))).encode())
        file = io.BytesIO()
        np.save(file, np.array(text.decode("utf-8", "replace")))
        stored = file.getvalue()
    else:
        stored = (in_array if change is in_values else change)(rng, stored)
    members[at] = (name, stored)
    if rng.random() < 0.1:
        members[at : at + 1] = rng.choice([[], [members[at], ("more.npy", stored)], [(f"{name}.npy", stored)]])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, stored in members:
            archive.writestr(name, stored)
    return file.getvalue()


# -- use -----------------------------------------------------------------------------------------------------------


def use_mask(path: Path) -> None:
    mask = BlockMask.load(path)
    mask.save(path)
    again = BlockMask.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(mask)
    jax.tree.map(np.testing.assert_array_equal, again, mask)
    assert str(mask)


def use_profile(path: Path) -> None:
    profile = HadsProfile.load(path)
    profile.save(path)
    again = HadsProfile.load(path)
    assert repr(again) == repr(profile) and again.rule == profile.rule
    profile.grid(4096 * profile.block)


def use_run(path: Path) -> None:
    """Everything that the dashboard does with a run file, while a healthy run is beside it."""
    library = library_of(path.parent.parent)
    live = Live(library)
    live._read_all()
    run = library.get(path.parent.name)
    assert run is not None
    listed = run_documents.runs(library)
    made = [listed, run_documents.run(library, run.id), run_documents.series(library, run.id, first=0, last=3)]
    json.dumps(made, allow_nan=False)
    assert "healthy" in {one["id"] for one in listed["runs"]}
    written = [*run.recent, run.written_in_file(Place()), *asyncio.run(Follower(run, Place(), live.status).next())]
    for sent in [event for one in written for event in one.events]:
        json.loads(sent.data)
        assert sent.identity is None or Place.parse(sent.identity)
    metrics_page.render(library, live)
    assert run.problem is None


class Kind(NamedTuple):
    make: Callable[[Path], None]
    name: str
    use: Callable[[Path], None]
    damage: list[Callable[[random.Random, bytes], bytes]]
    most: int  # damages of one file; a damaged archive cannot be opened to damage it further
    many: int  # files of the long fuzz


def make_mask(path: Path) -> None:
    chosen = np.random.default_rng(0).integers(-1, 8, (1, 64, 2, 3))
    BlockMask.from_token_indices(chosen, block_kv=8, block_q=16).save(path)


def make_other_mask(path: Path) -> None:
    xsake.patterns.random(64, 64, density=0.5, seed=0, heads=2, block_q=16, block_kv=16).save(path)


def make_profile(path: Path) -> None:
    hads_case.random_profile().save(path)


def make_run(path: Path) -> None:
    write_run(path.parent.parent / "healthy", 3)
    events = [
        {"event": "eval", "step": 4, "loss": 3.5, "time": 1.7e9},
        {"event": "density", "step": 4, "layers": [[0.5, 0.25], [1.0, 0.125]]},
        {"event": "recalibrate", "step": 4, "seconds": 1.5},
        {"event": "resumed", "step": 4, "time": 1.7e9, "process": {"host": "here", "pid": 1}},
        {"event": "failed", "step": 5, "reason": "loss is not finite"},
    ]
    about = {"process": {"host": "here", "pid": 1}, "environment": {"jax": "0.12"}, "command": "xsake train"}
    file = write_run(path.parent, 4, **about)
    with open(file, "a") as opened:
        opened.write("".join(json.dumps(event) + "\n" for event in events) + step_line(5))


KINDS = {
    "mask": Kind(make_mask, "mask.npz", use_mask, [in_archive, in_archive, in_archive, in_bytes, cut], 1, 3_000),
    "mask of blocks": Kind(make_other_mask, "mask.npz", use_mask, [in_archive], 1, 3_000),
    "profile": Kind(make_profile, "profile.json", use_profile, [in_values, in_field, in_bytes, cut], 3, 5_000),
    "run": Kind(
        make_run, "damaged/metrics.jsonl", use_run, [in_values, in_field, in_field, in_lines, in_bytes, cut], 5, 1_000
    ),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_plainly_or_taken(tmp_path, name, many):
    kind = KINDS[name]
    path = tmp_path / kind.name
    kind.make(path)
    kind.use(path)
    good = path.read_bytes()
    seed = random.SystemRandom().getrandbits(32) if many else 0
    for case in range(kind.many if many else 120):
        rng, data = random.Random(f"{seed} {case}"), good
        for _ in range(rng.randint(1, kind.most)):
            data = rng.choice(kind.damage)(rng, data)
        path.write_bytes(data)
        try:
            assert_plain(kind.use, path)
        except Exception as error:
            error.add_note(f"seed {seed}, case {case}: {data[:1000]!r}")
            raise


@pytest.mark.parametrize("seconds", [1e303, 1e308, -1e308])
def test_runs_of_any_length_are_shown(tmp_path, seconds):
    path = tmp_path / KINDS["run"].name
    make_run(path)
    with open(path, "a") as file:
        file.write(step_line(6, seconds=seconds) + step_line(7, seconds=seconds))
    assert_plain(use_run, path)


def assert_plain(use: Callable[[Path], None], path: Path) -> None:
    """The file is used, or refused by a ValueError of one line; soon, and in little memory."""
    began = time.process_time()
    tracemalloc.start()
    try:
        use(path)
    except ValueError as error:
        said = str(error)
        assert type(error) is ValueError and "\n" not in said and len(said) < 700 and path.name in said, said
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    took = time.process_time() - began
    assert took < SECONDS and peak < BYTES, (took, peak)
