"""What the GPU benchmarks do beside timing: contestants are checked, pairs are counted, records become tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import first_call, packing, peers, prompt, sanitize
from benchmarks.gpu import selection as gpu_selection
from benchmarks.harness import contestant, masks
from benchmarks.harness.case import BOTH, DIRECTIONS, Case
from benchmarks.report import aims, selection

X = jnp.arange(1.0, 5.0)
OURS = {"output": 2 * X}
UNSUPPORTED = "their kernel takes no such call"


def right(x):
    return 2.0 * x


def wrong(x):
    return 3.0 * x


def failing(*given):
    raise RuntimeError(UNSUPPORTED)


def checked(function):
    return contestant.checked(function, (X,), OURS)


def test_a_contestant_that_agrees_is_raced():
    found = checked(right)
    assert found.run is not None and found.words is None and found.differences == {"output": 0.0}
    np.testing.assert_array_equal(found.run(), 2 * X)


def test_a_wrong_contestant_is_not_raced():
    found = checked(wrong)
    assert found.run is None and found.words.endswith("it differs in output by 5.0e-01")
    assert checked(lambda x: x * jnp.nan).run is None
    assert checked(lambda x: x[:2]).run is None


def test_a_failure_is_told_and_kept_short():
    words = f"it fails: RuntimeError: {UNSUPPORTED}"
    assert checked(failing).recorded() == {"raced": False, "words": words, "differences": None, "variant": None}
    assert len(contestant.told(ValueError("x" * 10_000))) < contestant.MOST_CHARACTERS + 10


def test_the_fastest_is_of_the_right_variants():
    variants = {"bad": wrong, "good": right, "none": failing, "also good": lambda x: x + x}
    found = contestant.fastest(variants, (X,), OURS)
    assert found.run is not None and found.variant in ("good", "also good")
    assert contestant.fastest({"none": failing, "bad": wrong}, (X,), OURS).variant == "none"


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


@pytest.mark.parametrize("sizes", [(256, 16, 64), (250, 16, 64), (256, 64, 128), (200, 64, 16)])
def test_pairs_are_counted_as_the_mask_says(sizes):
    tokens, block_q, block_kv = sizes
    mask = packing.mask_of(tokens, 2, block_q, block_kv, 0.4)
    assert packing.pairs(mask) == np.asarray(mask.to_elements()).sum() / (2 * tokens)


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


def test_a_record_without_peers_has_no_table_of_them():
    assert selection.beside_peers([{"tokens": 8, "seconds": {}}]) == []


def test_a_cause_of_failure_is_told_once():
    peers = {"ejkernel, forward": {"raced": False, "words": "no `x`", "differences": None, "variant": None}}
    rows = [{"tokens": n, "group": 16, "choice": "scored", "seconds": {}, "peers": peers} for n in (8, 16)]
    assert selection.beside_peers(rows) == ["Not timed, since no 'x': ejkernel, forward."]


def test_the_cpu_has_no_raw_triton():
    assert jax.default_backend() != "cpu" or gpu_selection.variants_of("raw_triton", 16) == "it needs an NVIDIA GPU"


@pytest.mark.parametrize(
    ("said", "code", "errors", "warnings"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0, 0),
        ("========= ERROR SUMMARY: 2 errors", 1, 2, 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 1, 2, 1),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", 0, 0, 1),
        ("========= ERROR SUMMARY: 0 errors", 1, None, 0),
        ("no such tool", 127, None, 0),
    ],
)
def test_what_the_sanitizer_says_is_counted(said, code, errors, warnings):
    assert sanitize.errors_in(said, code) == errors and sanitize.warnings_in(said) == warnings


def test_a_value_that_rounds_to_its_aim_is_not_missed():
    assert [aims.said(x, 1.05, more_is_better=True) for x in (1.046, 1.044)] == ["reached", "missed"]


def test_masks_of_hads_are_raced_beside_random_ones_of_as_many_blocks():
    raced, small = masks.masks_of(masks.HADS), masks.hads_blocks()
    for name, blocks in small.items():
        chosen, drawn = (np.asarray(raced[n].to_blocks())[0] for n in (name, f"random, as {name}"))
        assert chosen.shape == (masks.HADS.q_heads, 64, 64) and (chosen.sum((1, 2)) == drawn.sum((1, 2))).all()
        assert chosen.diagonal(axis1=1, axis2=2).all() and drawn.diagonal(axis1=1, axis2=2).all()
        own = np.asarray(masks.with_small_blocks(masks.HADS, name).to_blocks())[0]
        np.testing.assert_array_equal(own, blocks)
        np.testing.assert_array_equal(chosen, own.reshape(-1, 64, 2, 64, 2).any((2, 4)))
    assert len(raced) == 2 * len(small) == 6


def test_the_aims_with_masks_of_hads():
    raced = {
        ("smollm8k", "forward+backward", mask): x for mask, x in (("HADS 20%", 300.0), ("random, as HADS 20%", 320.0))
    }
    by = {(*call, who): x for call, x in raced.items() for who in ("xsake", "fa4")}
    found = {what.partition("backward, ")[2]: (aim, ratio) for what, aim, ratio, _ in aims.kernels(by)}
    assert found == {
        "HADS 20%: over FlashAttention-4": (1.05, 1.0),
        "HADS 20%: throughput over that of a random mask": (0.90, 300 / 320),
    }


def test_a_models_file_needs_its_profile_and_a_text():
    with pytest.raises(SystemExit, match=r"x\.gguf is a file, .* it needs --profile and --texts"):
        prompt.Subject.of_file("x.gguf", None, None)


class Tensor:
    """As much of torch's as a race asks for."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self.array


@pytest.mark.parametrize("off", [0.0, 0.01, 0.1, np.nan])
def test_a_peer_with_other_results_is_not_raced(off):
    race = object.__new__(peers.Race)
    race.case, race.name, race.workload = Case(masks.HADS, BOTH), "random 43%", masks.HADS
    ours = tuple(jnp.full((2, 3), value, jnp.bfloat16) for value in (1.0, 2.0))
    race.contestants = {peers.OURS: lambda: ours}
    race.check()  # without a peer there is nothing to compare
    race.contestants["fa4"] = lambda: (Tensor(ours[0]), Tensor(ours[1] * jnp.bfloat16(1 + off)))
    if off <= 0.01:
        race.check()
        return
    with pytest.raises(ValueError, match=r"smollm8k, forward\+backward, random 43%: relative to the norms"):
        race.check()


def test_every_kind_of_call_is_measured_at_every_length():
    found = first_call.measure(lambda length: lambda q, k, v: q + k + v, [16, 32], heads=1)
    calls = [f"{how}{what}" for what in ("forward", "gradient") for how in ("outside jit, first ", "jit, first ")]
    calls += [f"outside jit, {what} again" for what in ("forward", "gradient")]
    assert sorted(found) == sorted(calls)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())
