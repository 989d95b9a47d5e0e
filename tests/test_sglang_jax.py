"""`xsake.compat.sglang_jax` where the engine is not installed: settings, and what the command line says.

The engine itself is run by `make serve-test`, in an environment of its own.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from xsake.compat import sglang_jax
from xsake.compat.sglang_jax.settings import Settings


def test_options_of_the_engine_are_left_to_it():
    given = ["--model-path", "m", "--implementation", "xla", "--port", "3000", "--device=cpu"]
    settings, rest = Settings.of_arguments(given)
    assert settings == Settings(implementation="xla")
    assert rest == ["--model-path", "m", "--port", "3000", "--device=cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementation", "cuda"], "implementation='cuda' is unknown"),
        (["--hads", "0.2"], "hads=0.2 needs hads_profile"),
        (["--hads", "1.2", "--hads-profile", "p.json"], "hads=1.2 must be above 0 and at most 1"),
        (["--hads-profile", "nowhere.json"], "nowhere.json"),
        (["--hads-policy", "never"], 'hads_policy=\'never\' must be "auto" or "always"'),
        (["--attention-backend", "fa"], "--attention-backend: xsake is the backend; leave it out"),
    ],
)
def test_wrong_options_end_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit):
        Settings.of_arguments(arguments)
    assert message in capsys.readouterr().err


def test_a_request_has_the_budget_that_it_says():
    settings = Settings(hads=0.2, hads_profile="profile.json")
    keys = {None: 0.2, "": 0.2, "tenant": 0.2, "hads=0.35": 0.35, "tenant;hads=1": 1.0, "hads=off;tenant": None}
    assert {key: settings.budget(key) for key in keys} == keys
    assert Settings().budget("tenant") is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("hads=0", "hads=0.0 must be above 0 and at most 1"),
        ("hads=1.5", "hads=1.5 must be above 0"),
        ("hads=nan", "hads=nan must be above 0"),
        ("hads=much", "hads=much must be a number above 0 and at most 1, or off"),
        ("hads", "hads= must be a number"),
        ("hads=0.2;hads=0.3", "has 2 budgets of HADS: give one"),
    ],
)
def test_a_wrong_budget_is_said(key, message):
    with pytest.raises(ValueError, match=message):
        Settings(hads_profile="profile.json").budget(key)
    with pytest.raises(ValueError, match="this server has no profile of its model: start it with --hads-profile"):
        Settings().budget("hads=0.2")


def _with_engine(monkeypatch, version):
    """An installation of sglang-jax of this version, without its code."""

    def found(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    places = types.ModuleType("places")
    places.take = lambda settings: None
    monkeypatch.setitem(sys.modules, "xsake.compat.sglang_jax.places", places)


def test_another_version_of_the_engine_is_refused(monkeypatch):
    _with_engine(monkeypatch, "0.2.0")
    with pytest.raises(NotImplementedError, match=r"sglang-jax 0.2.0 is installed, and .* only 0.1.0rc0 are known"):
        sglang_jax.install()


def test_a_missing_engine_is_said(monkeypatch):
    _with_engine(monkeypatch, None)
    with pytest.raises(ModuleNotFoundError, match=r"sglang-jax is not installed: docs/serving.md"):
        sglang_jax.install()
