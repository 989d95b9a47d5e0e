"""The command line, as a person sees it."""

from typer.testing import CliRunner

import xsake
from xsake._cli import app


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "info" in result.output and "demo" in result.output


def test_info_names_devices_versions_and_implementations() -> None:
    result = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "devices:" in result.output and "jax" in result.output and "tuning:" in result.output
    for name in xsake.implementations():
        assert name in result.output


def test_demo_shows_parity_and_times() -> None:
    small = ["demo", "--length", "512", "--heads", "2", "--head-dim", "16"]
    result = CliRunner().invoke(app, small, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "head 1" in result.output and "d value" in result.output and "sparse" in result.output


def test_demo_refuses_nonsense() -> None:
    result = CliRunner().invoke(app, ["demo", "--length", "3"])
    assert result.exit_code == 2
    assert "--length" in result.output
