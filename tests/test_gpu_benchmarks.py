"""GPU benchmarks at sizes of a test: which blocks they draw, what they refuse, what a small run records."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.gpu import first_call, packing, prompt, workbench
from benchmarks.gpu import selection as gpu_selection
from benchmarks.report import selection
from xsake._race.course import DIRECTIONS

UNSUPPORTED = "their kernel takes no such call"


def failing(*given):
    raise RuntimeError(UNSUPPORTED)


def test_repeated_blocks_are_no_blocks():
    chosen = np.asarray(gpu_selection.uniform(200, 2))
    assert (chosen[..., 0] == np.arange(200)[None, :, None] // gpu_selection.BLOCK).all()
    for row in chosen.reshape(-1, gpu_selection.COUNT):
        real = row[row >= 0]
        assert len(set(real)) == len(real)


def test_peers_are_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_selection", "--peers", "nobody"])
    with pytest.raises(SystemExit):
        gpu_selection.main()
    assert "--peers: nobody is not one of ejkernel" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_of_packing(monkeypatch):
    monkeypatch.setattr(packing, "DIM", 16)
    rows = packing.measure(128, 8, 1, 64, 0.5, rounds=2)
    assert [r["block_q"] for r in rows] == [16, 64] and max(r["error"] for r in rows) < 0.01


@pytest.mark.slow
def test_a_small_run_of_selection(monkeypatch):
    """With contestants that are right, wrong and failing: only the right one is timed."""

    def variants_of(peer, group):
        return {
            "raw_triton": {"by XLA": lambda *given: gpu_selection.selected(*given, implementation="xla")},
            "ejkernel": {"doubled": lambda *given: 2 * gpu_selection.selected(*given)},
            "ejkernel, mended": {"none": failing},
        }[peer]

    monkeypatch.setattr(gpu_selection, "variants_of", variants_of)
    monkeypatch.setattr(gpu_selection, "DIM", 16)
    case = gpu_selection.Case(128, 16, 16, ("uniform",), False)
    programs = gpu_selection.compile_all([case], "xla")
    (row,) = gpu_selection.measure(case, programs, "xla", 2, gpu_selection.PEERS["ejkernel"])
    assert set(row["seconds"]) == {f"{who}, {d}" for who in ("selected", "raw_triton") for d in DIRECTIONS}
    assert set(row["peers"]["raw_triton, forward+backward"]["differences"]) == set(gpu_selection.RESULTS)
    assert "ejkernel, mended, forward" not in row["peers"]
    assert row["peers"]["ejkernel, mended, forward+backward"]["words"] == f"it fails: RuntimeError: {UNSUPPORTED}"
    assert "differs in output by 1.0e+00, dQ by 1.0e+00" in row["peers"]["ejkernel, forward+backward"]["words"]
    said = selection.beside_peers([row])
    assert [words.split(":")[0] for words in said] == [
        "XSAKE's raw Triton kernels, forward",
        "XSAKE's raw Triton kernels, forward+backward",
        "Not timed, since its results are wrong",
        "Not timed, since its launch fails in JAX",
    ]
    assert said[2].endswith(": ejkernel, forward; ejkernel, forward+backward.")


def test_the_cpu_has_no_raw_triton():
    assert jax.default_backend() != "cpu" or gpu_selection.variants_of("raw_triton", 16) == "it needs an NVIDIA GPU"


def test_a_models_file_needs_its_profile_and_a_text():
    with pytest.raises(SystemExit, match=r"x\.gguf is a file, .* it needs --profile and --texts"):
        prompt.Subject.of_file("x.gguf", None, None)


@pytest.mark.slow
def test_a_long_prompt_is_read_by_some_of_the_layers():
    """In one piece and in chunks; a budget below what is always on fails alone."""
    model = prompt.make(dataclasses.replace(prompt.MODELS["tiny"][0], layers=1))
    one = prompt.LongRead.of("tiny", model, prompt.profile_for(model, 1024), 1024)
    row = one.measure(one.ways("xla", [0.5, 0.01], 512), rounds=1)
    assert (row["layers"], row["of"], row["blocks"]) == (1, 2, [128, 32])
    ours = {"dense", "HADS 50%", "HADS 50%, chunks of 512", "dense, chunks of 512"}
    assert ours == set(row["seconds"]) - {"dense by xla"}
    assert "always on" in row["failed"]["HADS 1%"]


def test_every_kind_of_call_is_measured_at_every_length():
    found = first_call.measure(lambda length: lambda q, k, v: q + k + v, [16, 32], heads=1)
    calls = [f"{how}{what}" for what in ("forward", "gradient") for how in ("outside jit, first ", "jit, first ")]
    calls += [f"outside jit, {what} again" for what in ("forward", "gradient")]
    assert sorted(found) == sorted(calls)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_what_a_check_prints_is_recorded(monkeypatch):
    said = [
        "mine: float16; blocks of 16 and 32 tokens",
        "┃ check │ forward │ gradients │ ┃",
        "│ masks: no mask │ holds │ – │ there are none │",
        "│ rules: causal mask │ – │ – │ mask may leave out blocks │",
        "mine: 1 of 2 checks hold (1 without gradients), 0 fail, 1 were refused by name",
    ]
    monkeypatch.setattr(workbench, "command", lambda *words: {"said": said})
    row = workbench.checked("mine")
    assert row["checks"]["masks: no mask"] == ["holds", "–", "there are none"] and len(row["checks"]) == 2
    assert row["counts"] == {"hold": 1, "all": 2, "without_gradients": 1, "fail": 0, "refused": 1}
