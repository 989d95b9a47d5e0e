"""The commands of the workbench, briefly, in one process; as a script, those of a package that is installed."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xsake._cli import app
from xsake._measure import isolation, timing
from xsake._measure.interference import Contention
from xsake._op import registry
from xsake._race import gate, one, paired, slowdown, sustained
from xsake.autotune.measure import contest
from xsake.autotune.measure.device_service import DeviceService
from xsake.autotune.search import last_race

# What a command gets besides, so that it takes a second or two. All share a shape, and with it programs.
SIZES, DENSITY = "1x96x4x16,block=16", "density=0.4"
BRIEFLY = {
    "race": ["--rounds", "2"],
    "gate": ["--rounds", "8", "--round-seconds", "0.001"],
    "check": ["--quick", "--only", "determinism"],
    "autotune": ["--no-isolate", "--trials", "2"],
    "new-kernel": [],
    "tuning": [],
}


def set_up(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without processes of their own, which other tests have, on a machine that others use."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XSAKE_TUNING_DIR", str(folder / "tuned"))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # `xsake check` adds some
    monkeypatch.setattr(isolation, "Worker", isolation.InProcess)
    monkeypatch.setattr(paired, "disturbance", lambda *race: None)
    monkeypatch.setattr(slowdown, "RULED_OUT", 1e9)
    monkeypatch.setattr(gate, "RULED_OUT", 1e9)
    monkeypatch.setattr(last_race, "disturbance", lambda *race: None)
    monkeypatch.setattr(contest, "contention", lambda: contextlib.nullcontext(Contention()))
    monkeypatch.setitem(DeviceService.__init__.__kwdefaults__, "round_seconds", 0.002)
    monkeypatch.setattr(one, "race", partial(timing.race, min_seconds=0.002))
    for name in ("PAUSE", "BURST", "SUSTAINED"):
        monkeypatch.setattr(sustained, name, 1e-4)


def small(shape: str) -> str:
    """The same parts of a shape with little in them."""
    _, *rest = shape.split(",")
    return ",".join([SIZES, *(re.sub(r"kv=.*", "kv=4", re.sub("density=.*", DENSITY, part)) for part in rest)])


def run(words: list[str], ends: tuple[int, ...] = (0,)) -> str:
    """What a command says, with small shapes."""
    shapes = ("--shape", "--from-call")
    words = [small(word) if before in shapes else word for before, word in zip(["", *words], words, strict=False)]
    if words[0] == "autotune" and "--from-call" not in words:
        words += ["--from-call", f"{SIZES},causal,{DENSITY}"]
    said = CliRunner().invoke(app, [*words, *BRIEFLY[words[0]]], env={"COLUMNS": "150"})
    assert said.exit_code in ends, f"{words}: {said.output}"
    return said.output


def main() -> None:
    """Check, tune, race and gate examples/simple_kernel, whose folder is given, as it is installed here."""
    folder, example = map(Path, sys.argv[1:])
    assert registry.source("simple_kernel") == "simple-kernel 0.1.0"
    found = Path(sys.modules[registry.get("simple_kernel").__name__].__file__ or "")  # type: ignore[attr-defined]
    assert found.is_relative_to(sys.prefix), found
    set_up(pytest.MonkeyPatch(), folder)
    gated = runpy.run_path(str(example / "gate.py"))["command"]
    shape = "1x4096x8x64,causal"
    for words, says in (
        (["check", "simple_kernel"], "1 of 1 checks hold"),
        (
            ["autotune", "--implementation", "simple_kernel", "--from-call", f"{shape},{DENSITY}"],
            "1 workload-density pairs",
        ),
        (["race", "--shape", shape, "--against", "simple_kernel"], "simple_kernel"),
        (gated(record=True), "recorded in"),
    ):
        said = run(words)
        assert says in said, said
    said = run(gated(record=False), ends=(0, 1, 3))  # in so little time a call may seem slower
    assert said.count("simple_kernel forward") >= 2 and "now over recorded" in said, said


if __name__ == "__main__":
    main()
