"""Two checkouts compared: their speed, their results, their machine code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compare_trees
from benchmarks.harness import checkouts, tree_runner
from benchmarks.record import ROOT
from tests import machine_code as code

NOT_COPIED = shutil.ignore_patterns(".*", "results", "web", "node_modules", "_build", "out", "vendor")


def test_a_checkout_races_against_another(tmp_path):
    """The other checkout is this one with larger queries."""
    other = tmp_path / "other"
    shutil.copytree(ROOT, other, symlinks=True, ignore=NOT_COPIED)
    operation, line = other / "src" / "xsake" / "_op" / "attention.py", "    check_inputs(query, key, value)\n"
    text = operation.read_text()
    assert text.count(line) == 1
    operation.write_text(text.replace(line, line + "    query = query * 1.0625\n"))

    command = [sys.executable, "-m", "benchmarks.compare_trees", "--against", str(other), "--only=gpt4k_d64"]
    command += ["--length=128", "--masks=random 43%", "--directions=forward", "--rounds=2", "--seconds=0.001"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "compare_trees.json").read_text())["results"]
    assert found["workload"] == "gpt4k_d64" and 1e-3 < found["apart"] < 0.5
    assert [len(found["seconds_per_call"][name]) for name in ("this", "other")] == [2, 2]


def test_what_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="is a folder without src/xsake"), checkouts.checkout(str(tmp_path)):
        pass
    refusal = "no-such-commit is neither a folder nor a commit"
    with pytest.raises(SystemExit, match=refusal), checkouts.checkout("no-such-commit"):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only=gpt5"], "--only: gpt5 is not one of llama32k, full16k, gpt4k"),
        (["--directions=back"], "--directions: back is not one of forward, forward+backward"),
    ],
)
def test_what_is_not_raced_is_refused(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_trees", *options])
    with pytest.raises(SystemExit):
        compare_trees.main()
    assert said in capsys.readouterr().err


def test_the_ratio_is_of_turns_of_one_round():
    ratio = compare_trees.compared({"this": [1.0, 2.0, 4.0], "other": [2.0, 4.0, 8.0]})  # the chip slows down
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_bit_more_is_another_result(dtype):
    x = jnp.linspace(-1.0, 1.0, 4001).astype(dtype)
    width = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    changed = np.array(x)
    changed.view(np.dtype(width))[17] ^= 1
    this, other = ([tree_runner.described(jnp.asarray(a))] for a in (x, changed))
    assert this[0]["bits"] != other[0]["bits"]
    assert compare_trees.distance(this, this) == 0.0
    assert compare_trees.distance(this, [tree_runner.described(-x)]) == pytest.approx(2.0)


DISASSEMBLED = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/               @P0 FADD R2, R3, R4 ;
        /*0020*/              @!P1 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0030*/                   FADD R2, R3, R5 ;
"""


def test_machine_code_is_compared_instruction_by_instruction():
    lines = code.instructions(DISASSEMBLED)
    assert lines[1] == "@P0 FADD R2, R3, R4 " and len(lines) == 4
    this = code.Kernel("dq", lines, 168, 0)
    assert code.row(this, this) == ("4", "168", "0", "the same")
    fewer = code.Kernel("dq", lines[:2], 168, 8)
    assert code.row(fewer, this) == ("4 -> 2", "168", "0 -> 8", "-1 BAR.SYNC.DEFER_BLOCKING, -1 FADD")
    moved = code.Kernel("dq", lines[::-1], 168, 0)
    assert code.row(moved, this)[-1] == "in another order, or other operands"
    assert code.row(None, this) == ("4 -> none", "168 -> none", "0 -> none", "gone")
