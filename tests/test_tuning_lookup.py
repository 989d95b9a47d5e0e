"""The tuning database's reader: which entry serves a call, and that a bad file does not break a call."""

from __future__ import annotations

import dataclasses
import json
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from tuning_fakes import KEY, entry

import xsake
from xsake import tuning_db
from xsake._op import tuned
from xsake._op.arguments import build_call
from xsake.kernels_xla_ref import Config, Tiling
from xsake.tuning_db import Database, Entry


@pytest.fixture
def user(tmp_path, monkeypatch):
    """The user's folder, and none of the shipped files."""
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(tuning_db.lookup, "SHIPPED", tmp_path / "shipped")
    tuning_db.lookup.warn_once.cache_clear()
    tuned._tell_stale.cache_clear()
    for folder in ("user", "shipped"):
        (tmp_path / folder).mkdir()
    return tmp_path / "user"


def put(folder, *entries: Entry) -> None:
    (folder / "cpu.json").write_text(Database("cpu", entries).dump())


def call(length: int = 128, density_hint: float | None = None):
    x = jnp.ones((1, length, 2, 16))
    mask = xsake.patterns.causal(length, length, block_q=32, block_kv=32)
    if density_hint is not None:
        mask = dataclasses.replace(mask, density_hint=density_hint)
    return build_call(x, x, x, mask, default_blocks=(32, 32))


def chosen(**options) -> int:
    return tuned.choose("xla", call(**options)).config.forward.chunk


def heuristic(**options) -> int:
    from xsake.kernels_xla_ref import default_config

    return default_config(call(**options)).forward.chunk


def test_key_of_a_call():
    assert tuned.key_of("xla", call(), "forward") == KEY
    assert tuned.key_of("xla", call(length=100), "forward") == KEY, "lengths are put in buckets"


def test_without_files_the_heuristic_serves(user):
    choice = tuned.choose("xla", call())
    assert choice.config.forward.chunk == heuristic()
    assert choice.found == {"forward": None, "backward": None}


def test_order_of_the_sources(user):
    shipped = user.parent / "shipped"
    near = dict(q_len=256, kv_len=256)
    put(shipped, entry(3, **near))
    assert chosen() == 3, "shipped, nearest"
    put(user, entry(4, **near))
    assert chosen() == 4, "the user's nearest before the shipped nearest"
    put(shipped, entry(5), entry(3, **near))
    assert chosen() == 5, "shipped exact before the user's nearest"
    put(user, entry(6), entry(4, **near))
    assert chosen() == 6, "the user's exact before the shipped exact"
    with tuning_db.overlay(Database("cpu", [entry(7, **near)])):
        assert chosen() == 7, "an overlay before all files"
        with tuning_db.overlay(Database("cpu", [entry(8)])):
            assert chosen() == 8, "the innermost overlay first"
        with tuning_db.heuristics_only():
            assert chosen() == heuristic()
    assert chosen() == 6
    (user / "cpu.json").unlink()
    assert chosen() == 5


def test_overlay_reads_a_file(user, tmp_path):
    put(tmp_path, entry(9))
    with tuning_db.overlay(tmp_path / "cpu.json") as database:
        assert len(database) == 1 and chosen() == 9
    with pytest.raises(FileNotFoundError), tuning_db.overlay(tmp_path / "nothing.json"):
        pass


def test_attention_uses_the_entry_and_a_given_config_wins(user, monkeypatch):
    put(user, entry(5))
    seen = []
    from xsake import kernels_xla_ref

    real = kernels_xla_ref.forward
    monkeypatch.setattr(kernels_xla_ref, "forward", lambda call, config: seen.append(config) or real(call, config))
    mask = xsake.patterns.causal(128, 128, block_q=32, block_kv=32)
    one = Tiling(q=16, kv=16, chunk=2)
    for config in (None, Config(forward=one, backward=one)):
        jax.eval_shape(
            lambda x, config=config: xsake.attention(x, x, x, mask, config=config), jnp.ones((1, 128, 2, 16))
        )
    assert [c.forward.chunk for c in seen] == [5, 2]
    assert seen[0].backward == kernels_xla_ref.default_config(call()).backward, "a direction without an entry"


def test_look_up_happens_while_tracing_only(user, monkeypatch):
    put(user, entry(5))
    looked = []
    real = tuning_db.find
    monkeypatch.setattr(tuning_db, "find", lambda *args: looked.append(args) or real(*args))
    x = jnp.ones((1, 128, 2, 16))
    mask = xsake.patterns.causal(128, 128, block_q=32, block_kv=32)
    run = jax.jit(lambda x: xsake.attention(x, x, x, mask))
    run(x)
    assert len(looked) == 2, "one for each direction"
    run(x)
    run(x + 1)
    assert len(looked) == 2


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        (dict(q_len=1024, kv_len=1024), True),
        (dict(q_len=2048, kv_len=2048), False),
        (dict(density=0.125), True),
        (dict(density=0.0884), False),
        (dict(heads=128), True),
        (dict(heads=256), False),
        (dict(q_len=512, kv_len=512, density=0.5), True),
        (dict(q_len=512, kv_len=512, density=0.25), False),
        (dict(density=None), True),
        (dict(head_dim=32), False),
        (dict(value_dim=32), False),
        (dict(dtype="bfloat16"), False),
        (dict(group=2), False),
        (dict(block_q=64), False),
        (dict(block_kv=64), False),
        (dict(causal=False), False),
        (dict(direction="backward"), False),
        (dict(implementation="triton"), False),
        (dict(operation="other"), False),
    ],
)
def test_what_is_near(changes, near):
    database = Database("cpu", [entry(**changes)])
    assert (database.nearest(KEY) is not None) == near
    assert database.exact(KEY) is None


def test_the_nearest_is_taken():
    database = Database(
        "cpu", [entry(1, q_len=512, kv_len=512), entry(2, q_len=256, kv_len=256, density=0.5), entry(3, density=0.5)]
    )
    assert database.nearest(KEY).config["chunk"] == 3
    far = dataclasses.replace(KEY, q_len=1024, kv_len=1024)
    assert database.nearest(far).config["chunk"] == 1


def test_unknown_density():
    unknown = dataclasses.replace(KEY, density=None)
    database = Database("cpu", [entry(1, density=1.0), entry(2, density=0.5), entry(3, density=0.25)])
    assert database.nearest(unknown).config["chunk"] == 2, "taken for half"
    assert Database("cpu", [entry(1, density=0.5), entry(4, density=None)]).exact(unknown).config["chunk"] == 4


def test_nearest_is_logged(user, caplog):
    put(user, entry(5, q_len=256, kv_len=256))
    with caplog.at_level("INFO", logger="xsake"):
        chosen()
    assert "nearest: 256 x 256 tokens" in caplog.text


def test_a_stale_kernel_is_used_and_said_once(user, caplog):
    put(user, entry(5, kernel="0" * 16))
    with caplog.at_level("INFO", logger="xsake"):
        assert chosen() == 5 and chosen() == 5
    assert caplog.text.count("stale") == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"q": 32, "kv": 32}, r"has the fields \['q', 'kv', 'chunk'\]"),
        ({"q": 32, "kv": 32, "chunk": 3, "new": 1}, "has the fields"),
        ({"q": 32, "kv": 32, "chunk": 0}, "chunk=0 must be an int of at least 1 and at most 65536"),
        ({"q": 24, "kv": 32, "chunk": 3}, "tile 24 x 32 does not divide block 32 x 32"),
    ],
)
def test_a_configuration_that_does_not_suit_is_ignored_with_one_warning(user, caplog, config, reason):
    put(user, entry(config=config))
    for _ in range(2):
        assert chosen() == heuristic()
    assert [r.levelno for r in caplog.records] == [logging.WARNING]

    assert "tuned configuration ignored (user, exact)" in caplog.text and re.search(reason, caplog.text)


BAD_FILES = {
    "empty": "",
    "truncated": Database("cpu", [entry(5)]).dump()[:200],
    "corrupt": "\x00\x01 not JSON",
    "a list": "[]",
    "no schema": '{"entries": []}',
    "future schema": json.dumps({"schema_version": 4, "entries": "of another kind"}),
    "no entries": json.dumps({"schema_version": 1, "device_kind": "cpu", "environments": {}}),
    "deeply nested": '{"schema_version": 1, "entries": ' + "[" * 100_000,
    "a number of 5000 digits": "1" * 5000,
    "an odd entry": json.dumps({"schema_version": 1, "device_kind": "cpu", "environments": {}, "entries": [3]}),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_ignored_with_one_warning(user, caplog, what):
    put(user.parent / "shipped", entry(4))
    (user / "cpu.json").write_text(BAD_FILES[what])
    assert chosen() == 4 and chosen() == 4, "the shipped file serves instead"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert str(user / "cpu.json") in caplog.text
    if what == "future schema":
        assert "schema_version is 4, and this version of xsake knows 1 to 3" in caplog.text


def test_a_file_that_is_not_text(user, caplog):
    (user / "cpu.json").write_bytes(b"\xff\xfe\x00")
    assert chosen() == heuristic()
    assert "not text" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", "64"),
        ("head_dim", True),
        ("head_dim", 0),
        ("head_dim", 64.0),
        ("q_len", 10**30),
        ("density", -1.0),
        ("density", 1.5),
        ("density", float("nan")),
        ("causal", 1),
        ("dtype", None),
    ],
)
def test_keys_are_checked(field, value):
    given = entry().json()
    given["key"][field] = value
    with pytest.raises(tuning_db.UnreadableDatabase, match=rf"key\.{field}="):
        Entry.parse(given)


def test_entries_are_checked():
    good = entry().json()
    for change in (
        dict(source="guessed"),
        dict(config=None),
        dict(config={}),
        dict(key={"direction": "forward"}),
        dict(kernel=None),
        dict(date=20260101),
        dict(environment=["e"]),
        dict(speedup="fast"),
    ):
        with pytest.raises(tuning_db.UnreadableDatabase):
            Entry.parse(good | change)


def test_a_replaced_file_is_read_again(user):
    put(user, entry(5))
    assert chosen() == 5
    put(user, entry(50))
    assert chosen() == 50


def test_round_trip_is_sorted_one_entry_a_line():
    entries = [entry(n, q_len=1 << n, kv_len=1 << n, density=d) for n in (9, 7, 8) for d in (None, 0.5, 1.0)]
    text = Database("cpu", entries, {"e": {"jax": "1"}, "unused": {}}).dump()
    again = Database.parse(text)
    assert again.dump() == text == Database("cpu", reversed(entries), {"e": {"jax": "1"}}).dump()
    assert len(again) == 9 and len(text.splitlines()) == 9 + 7
    assert [e.key.q_len for e in again.entries] == sorted(e.key.q_len for e in entries)


class _Watched(dict):
    """A dictionary that counts look-ups, and fails if it is iterated over."""

    asked = 0

    def get(self, key, default=None):
        self.asked += 1
        return super().get(key, default)

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)

    def __iter__(self):
        raise AssertionError("a look-up went through all entries")


def test_look_up_asks_for_places_and_never_goes_through_the_entries():
    lengths, densities = range(1, 19), range(0, -20, -1)
    many = [entry(q_len=1 << q, kv_len=1 << q, density=2 ** (d / 2), heads=16) for q in lengths for d in densities]
    database = Database("cpu", many)
    (family,) = database._families
    places = database._families[family] = _Watched(database._families[family])
    hit = dataclasses.replace(KEY, q_len=1024, kv_len=1024, heads=16)
    near = dataclasses.replace(KEY, q_len=1024, kv_len=2048, heads=16)
    miss = dataclasses.replace(KEY, q_len=1, kv_len=1 << 24)
    for key, exact, nearest, most in ((hit, True, True, 2), (near, False, True, 100), (miss, False, False, 3000)):
        places.asked = 0
        assert (database.exact(key) is not None, database.nearest(key) is not None) == (exact, nearest)
        assert places.asked <= most


def test_where_a_user_s_results_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(tmp_path / "own"))
    assert tuning_db.user_directory() == tmp_path / "own"
    monkeypatch.delenv("XSAKE_TUNING_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert tuning_db.user_directory() == tmp_path / "xsake" / "tuning"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_db.user_directory() == tmp_path / ".local" / "share" / "xsake" / "tuning"
