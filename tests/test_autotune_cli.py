"""`xsake autotune` and `xsake tuning`, as a person uses them."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from tuning_fakes import Service, entry, part
from typer.testing import CliRunner

import xsake
from xsake import tuning_db
from xsake._cli import app, tuning
from xsake._measure import isolation
from xsake._measure.isolation import InProcess
from xsake._op import tuned
from xsake.autotune import calls, command, problem, record_calls
from xsake.autotune.search import last_race
from xsake.autotune.search.storage import CannotOpen, open_storage
from xsake.tuning_db import Database, Entry


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning_db.lookup, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path


def xsake_(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


TINY = ("--budget", "60s", "--trials", 2, "--no-isolate")


@pytest.fixture
def calm(monkeypatch):
    """Whatever else runs here, no race counts as disturbed."""
    monkeypatch.setattr(last_race, "disturbance", lambda times, contended: None)


def test_tuning_from_nothing_to_the_next_call(home, calm):
    output = xsake_(
        "autotune", "--from-call", "1x64x2x16,causal,block=32,density=1", *TINY, "--report", home / "report"
    )
    assert "results go to" in output and "workload-density pairs" in output
    database = Database.read(home / "cpu.json")
    assert {e.key.direction for e in database.entries} == {"forward", "backward"}
    report = (home / "report" / "report.md").read_text()
    assert "| 1x64x2x16 | 32 x 32 | forward | 100.0% |" in report
    assert len(list((home / "report").glob("*.png"))) == 2
    assert "cpu.json: valid" in xsake_("tuning", "validate", home / "cpu.json")
    # The entries serve the next call; they are made to differ from the heuristic, so that it shows.
    marked = [Entry(e.key, dict(e.config) | {"chunk": 7}, e.about) for e in database.entries]
    (home / "cpu.json").write_text(Database("cpu", marked, database.environments).dump())
    x, used = jnp.ones((1, 64, 2, 16)), []
    mask = xsake.patterns.causal(64, 64, block_q=32, block_kv=32)
    with tuned.listening(lambda name, call: used.append(tuned.choose(name, call))):
        jax.eval_shape(lambda x: xsake.attention(x, x, x, mask), x)
    assert used[0].config.forward.chunk == used[0].config.backward.chunk == 7
    assert {str(found) for found in used[0].found.values()} == {"user, exact"}
    assert f"tuning: your own in {home / 'cpu.json'}" in xsake_("info")


def test_info_says_where_a_configuration_comes_from(home):
    call = dict(q_len=4096, kv_len=4096, heads=8, head_dim=64, value_dim=64, block_q=128, block_kv=128)
    mine = entry(config={"q": 128, "kv": 128, "chunk": 11}, **call)
    (home / "cpu.json").write_text(Database("cpu", [mine]).dump())
    output = xsake_("info")
    assert re.search(r"forward .* chunk=11 .* user, exact", output) and re.search(r"backward .* heuristic", output)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--budget", "soon"], "'soon' is no duration of up to 1000h; write 90s, 5m or 1h"),
        (["--densities", "2"], "must be numbers above 0 and at most 1"),
        (["--blocks", "wide"], "must be whole numbers"),
        (["--workloads", "gpt5", "--no-isolate"], "are unknown; there are"),
        (["--from-call", "1x2x3", "--no-isolate"], "BxTxHxD"),
        (["--calls", "nothing.json", "--no-isolate"], "nothing.json is no recording of calls"),
        (["--implementation", "abacus", "--no-isolate"], "implementation='abacus' is unknown"),
        (["--budget", "9" * 400], "is no duration of up to 1000h"),
        (["--limit", "2000h"], "'2000h' is no duration of up to 1000h"),
        (["--seed", str(10**23)], "4294967295"),
        (["--seed", "-1"], "0"),
        (["--dtype", "int8"], "dtype='int8' must be one of ('bfloat16', 'float16', 'float32')"),
        (["--from-call", "1x16x1x16,density=x"], "call '1x16x1x16,density=x': could not convert"),
        (["--from-call", "1x16x1x16,causal=no"], "causal has no value"),
        (["--from-call", "1x16x1x16,block=16,block=32"], "nothing is given twice"),
        (["--from-call", "1x16x1x16", "--calls", "c.json"], "give one of --workloads, --from-call and --calls; got"),
        (["--from-call", "1x16x1x16", "--blocks", "16"], "--from-call says that itself: leave out --blocks"),
        (["--calls", "c.json", "--dtype", "float16"], "--calls says that itself: leave out --dtype"),
        (
            ["--storage", "foo://bar"],
            "storage 'foo://bar' cannot be opened: Can't load plugin: sqlalchemy.dialects:foo",
        ),
        (["--storage", "://"], "storage '://' cannot be opened: Could not parse"),
        (["--storage", "sqlite:////nowhere/at/all.db"], "cannot be opened: (sqlite3.OperationalError) unable to open"),
        (["--storage", "FILE"], "FILE' cannot be opened: its line 1 is no record of a journal: give another file"),
        (["--storage", "."], "storage '.' cannot be opened: [Errno 21] Is a directory"),
        (["--out", "FILE"], "FILE cannot be made a folder: File exists"),
        (["--report", "FILE"], "FILE cannot be made a folder: File exists"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_autotune_refuses_nonsense(home, arguments, told, monkeypatch):
    """The message is one sentence, and comes before a device is needed."""
    monkeypatch.setattr("xsake.autotune.command.Worker", None)
    monkeypatch.setattr("xsake.autotune.command.InProcess", None)
    (home / "FILE").write_text("a file\n")
    monkeypatch.chdir(home)
    result = CliRunner().invoke(app, ["autotune", *arguments])
    assert result.exit_code == (2 if arguments[0] == "--seed" else 1), result.exception  # 2: by click itself
    assert told in " ".join(result.output.split())


def test_the_help_names_all_parts_of_a_call(home):
    assert "".join(problem.CALL.split()) in "".join(xsake_("autotune", "--help").split())


def test_ctrl_c_has_its_exit_code(home, monkeypatch):
    def interrupted(tuner, problems):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "InProcess", lambda factory: InProcess(Service))
    monkeypatch.setattr(command.Tuner, "tune", interrupted)
    result = CliRunner().invoke(app, ["autotune", "--no-isolate"])
    assert result.exit_code == 130 and "No race was decided." in result.output


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg2://me:secret@h/x", "mysql+pymysql://me:secret@h/x", "redis://:secret@h"]
)
def test_a_missing_database_driver_is_named_and_no_password(home, monkeypatch, url):
    for package in ("psycopg2", "pymysql", "redis"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CannotOpen) as caught:
        open_storage(url)
    assert re.search(r"storage '.*:\*\*\*@h.*' cannot be opened: the package '\w+' is not installed", str(caught.value))
    assert "secret" not in str(caught.value)


def test_recorded_calls_become_problems(tmp_path):
    def program(x, k, mask, other):
        out = xsake.attention(x, x, x, mask)
        return xsake.attention(out, k, k, other), xsake.attention(x, x, x, dataclasses.replace(mask, density_hint=0.25))

    x, k = jnp.ones((1, 64, 4, 16)), jnp.ones((1, 32, 2, 16))
    mask = xsake.patterns.causal(64, 64, block_q=32, block_kv=32)
    other = dataclasses.replace(xsake.BlockMask.full(64, 32, block_q=64, block_kv=32), density_hint=None)
    with record_calls(tmp_path / "calls.json"):
        jax.eval_shape(program, x, k, mask, other)
    jax.eval_shape(lambda x: xsake.attention(x, x, x, mask), x)
    first, second = calls.read_calls(tmp_path / "calls.json")
    assert first.densities == (1.0, 0.25) and second.densities == (None,)
    assert (first.implementation, first.dtype, first.workload.is_causal) == ("xla", "float32", True)
    w = second.workload
    assert (w.length, w.kv_length, w.q_heads, w.kv_heads, w.block, w.block_kv) == (64, 32, 4, 2, 64, 32)
    assert not w.is_causal
    recorded = json.loads((tmp_path / "calls.json").read_text())
    assert [c["traced"] for c in recorded["calls"]] == [1, 1, 1]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[" * 100_000, '{"version": 2, "calls": []}', '{"version": 1, "calls": [{"batch": 1}]}']
)
def test_a_recording_that_is_none(tmp_path, text):
    (tmp_path / "calls.json").write_text(text)
    with pytest.raises(ValueError, match=r"calls.json is no recording of calls"):
        calls.read_calls(tmp_path / "calls.json")


# -- looking after files -----------------------------------------------------------------------------------------------


@pytest.fixture
def two(home):
    a, b = home / "a" / "cpu.json", home / "b" / "cpu.json"
    for path, entries in ((a, [entry(1), entry(2, q_len=256)]), (b, [entry(3), entry(4, heads=8)])):
        path.parent.mkdir()
        path.write_text(Database("cpu", entries).dump())
    return a, b


def test_show(two):
    output = xsake_("tuning", "show", *two)
    assert "128x128" in output and "chunk=4" in output and "1.25x" in output


def test_show_without_files_shows_those_in_use(home):
    (home / "cpu.json").write_text(Database("cpu", [entry(9)]).dump())
    assert "chunk=9" in xsake_("tuning", "show")


def test_diff(two):
    lines = sorted(line[:1] + line.rpartition(":")[2] for line in xsake_("tuning", "diff", *two).splitlines())
    assert lines == [
        "+ q=32, kv=32, chunk=4",
        "- q=32, kv=32, chunk=2",
        "~ q=32, kv=32, chunk=1 -> q=32, kv=32, chunk=3",
    ]


def test_merge(two, home):
    xsake_("tuning", "merge", home / "all.json", *two)
    assert sorted(e.config["chunk"] for e in Database.read(home / "all.json").entries) == [2, 3, 4]


def test_prune(home):
    path = home / "cpu.json"
    stale, fresh = entry(1), entry(2, q_len=256, kernel=tuned.kernel_hash("xla"))
    path.write_text(Database("cpu", [stale, fresh, entry(3, implementation="gone", heads=8)]).dump())
    assert "2 stale entries found, 1 kept" in xsake_("tuning", "prune", "--dry-run", path)
    assert len(Database.read(path)) == 3
    assert "2 stale entries dropped, 1 kept" in xsake_("tuning", "prune", path)
    assert [e.config["chunk"] for e in Database.read(path).entries] == [2]


@pytest.mark.parametrize("command", ["show", "prune", "merge"])
def test_a_file_that_cannot_be_read_is_named(home, command):
    (home / "bad.json").write_text("{")
    result = CliRunner().invoke(
        app, ["tuning", command, str(home / "bad.json"), *[str(home / "bad.json")] * (command == "merge")]
    )
    assert result.exit_code == 1 and "cannot be read" in " ".join(result.output.split())


def test_validate_tells_what_is_wrong(home):
    (home / "cpu.json").write_text(Database("cpu", [entry(1)]).dump())
    result = CliRunner().invoke(app, ["tuning", "validate", str(home / "cpu.json")])
    assert result.exit_code == 1 and "'seed' is a required property" in result.output
    odd = Entry(entry(1).key, {"q": 32, "kv": 32, "chunk": True}, entry(1).about)
    other = entry(2, direction="dq")
    (home / "cpu.json").write_text(Database("cpu", [odd, other]).dump())
    result = CliRunner().invoke(app, ["tuning", "validate", str(home / "cpu.json")])
    assert result.exit_code == 1 and "chunk=True must be an int of at least 1 and at most 65536" in result.output
    assert "'xla' has the directions ('forward', 'backward')" in result.output
    for text in ("{", "[" * 100_000):
        (home / "cpu.json").write_text(text)
        result = CliRunner().invoke(app, ["tuning", "validate", str(home / "cpu.json")])
        assert result.exit_code == 1 and "not JSON" in result.output


def test_validate_races_what_is_written(home, monkeypatch):
    monkeypatch.setattr(isolation, "Worker", lambda factory: InProcess(Service))
    monkeypatch.setattr(tuning, "problems_of", lambda path: [])  # the fake device's configurations suit no backend
    (good, bad), key = (home / "good.json", home / "bad.json"), entry().key
    for path, tile in ((good, 2), (bad, 8)):
        path.write_text(Database("Fake 9000", [entry(config=part(tile))]).dump())
    assert f"{key}: confirmed: 1.25x is written, the race shows 2.00x (2.00 to 2.00 in 15 rounds)" in xsake_(
        "tuning", "validate", "--race", good
    )
    result = CliRunner().invoke(app, ["tuning", "validate", "--race", str(good), str(bad)])
    assert result.exit_code == 1 and len(Database.read(bad)) == 1
    assert f"{key}: not confirmed: 1.25x is written, the race shows 0.50x" in result.output
    assert f"{good}: 1 confirmed" in result.output and f"{bad}: 1 not confirmed" in result.output
    result = CliRunner().invoke(app, ["tuning", "validate", "--race", "--drop", str(good), str(bad)])
    assert f"{bad}: 1 entries dropped, 0 kept" in result.output
    assert (len(Database.read(good)), len(Database.read(bad))) == (1, 0)
    result = CliRunner().invoke(app, ["tuning", "validate", "--drop", str(good)])
    assert result.exit_code == 1 and "--drop drops what --race does not confirm: give both" in result.output


def test_refresh_races_the_entries_of_another_environment(home, monkeypatch):
    monkeypatch.setattr(isolation, "Worker", lambda factory: InProcess(Service))
    monkeypatch.setattr(command, "Worker", lambda factory: InProcess(Service))
    path = home / tuning_db.file_name("Fake 9000")
    for tile, says in ((2, "1 renewed, 0 dropped, 0 left as they were"), (8, "0 renewed, 1 dropped, 0 left")):
        old = entry(config=part(tile))
        path.write_text(Database("Fake 9000", [old]).dump())
        said = xsake_("autotune", "--refresh")
        assert "1 of 1 entries are of another driver, JAX or kernel" in said and says in said
        for kept in Database.read(path).entries:
            assert kept.config == part(2) and kept.about["speedup"] == 2.0
            assert kept.about["environment"] != old.about["environment"]
    assert len(Database.read(path)) == 0
    result = CliRunner().invoke(app, ["autotune", "--refresh", "--dtype", "float32"])
    assert result.exit_code == 1 and "leave out --dtype" in " ".join(result.output.split())
