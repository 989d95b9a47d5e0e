"""Verdicts on speed: the regression gates tolerate noise, fail slower programs, and give no verdict on a busy machine;
two checkouts are compared by their speed, their results, their machine code.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from benchmarks import gate as own_gates
from benchmarks.harness import checkouts, tree_runner, two_trees
from benchmarks.record import ROOT
from tests import machine_code as code
from xsake._measure import interference
from xsake._measure.interference import Contention, contention, disturbance
from xsake._measure.ratio import Ratio
from xsake._measure.timing import Timing
from xsake._op import registry
from xsake._race import gate
from xsake._race.paired import Paired
from xsake._race.slowdown import slowdown_since

BUSY = "threads waited"
THEN = Ratio.of([0.98, 0.99, 1.0, 1.01, 1.02] * 3)


@pytest.mark.parametrize(
    ("measurements", "told"),
    [
        ([(1.0, None)], "ok"),
        ([(1.4, BUSY), (1.0, None)], "ok"),
        ([(1.4, None)] * 3, "slower"),
        ([(1.4, BUSY), (1.4, None), (1.4, BUSY)], "slower"),
        ([(1.4, None), (1.0, None), (1.0, None)], "no verdict"),
        ([(1.0, BUSY)] * 3, "no verdict"),
    ],
    ids=str,
)
def test_verdicts(measurements, told):
    """Measurements go on until one tells that the call is as fast; rounds of calm ones count together."""
    waiting = [Paired([slower] * 15, [1.0] * 15, disturbed) for slower, disturbed in measurements]
    slowdown = slowdown_since(THEN, lambda: waiting.pop(0))
    assert slowdown.told == told and not waiting
    assert (slowdown.reason == "the machine is busy (threads waited)") == all(busy for _, busy in measurements)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_no_noise_makes_a_slower_call_ok(spread, slower):
    """Nor an equally fast one slower: at worst there is no verdict."""
    noise = random.Random(1)

    def paired(times):
        return Paired([times * noise.lognormvariate(0, spread) for _ in range(15)], [1.0] * 15)

    told = [slowdown_since(paired(1.0).ratio, lambda: paired(slower)).told for _ in range(200)]
    assert told.count("ok" if slower > 1 else "slower") <= 2, told


def test_the_projects_own_gates_record_once(tmp_path):
    first = own_gates.words(tmp_path, "cpu", "cpu", record_anew=False)
    assert first[3:6] == ["--record", "--gradients", "--shape"] and "1x4096x8x64,causal,density=0.43" in first
    recorded = dict(shape="1x4096x8x64", implementation="xsake", direction="forward", dtype="float32", ratios=[0.1] * 8)
    own_gates.gate.save([{"extra_info": recorded}], tmp_path, "cpu")
    again = own_gates.words(tmp_path, "cpu", "cpu", record_anew=False)
    assert again == ["gate", "--storage", str(tmp_path)]
    assert own_gates.words(tmp_path, "cpu", "cpu", record_anew=True) == first
    assert "--record" in own_gates.words(tmp_path, "gpu", "NVIDIA H200", record_anew=False), "of another device"


def test_what_disturbs():
    quiet, wide = Timing(1.0, 0.95, 1.1, 5), Timing(1.0, 0.8, 1.3, 5)
    assert disturbance({"a": quiet, "b": quiet}, Contention(ran=2.0, waited=0.1)) is None
    assert disturbance({"a": quiet, "b": wide}, Contention()) == "the quartiles of 'b' are 50% of its median apart"
    told = disturbance({"a": quiet}, Contention(ran=2.0, waited=1.0))
    assert told == "threads waited for a core 0.50 s for each second that they ran"


@pytest.mark.skipif(not interference._thread_seconds(), reason="this system does not tell how long threads waited")
def test_others_that_run_are_seen():
    """With twice as many busy processes as cores, a thread must wait for a core."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with contention() as contended:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert contended.share > interference.WAITED


def test_a_slowed_kernel_is_measured_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "slowed_for_a_gate.py").write_text(SLOWED)
    xsake.register_backend("slowed", tmp_path / "slowed_for_a_gate.py")
    about = dict(shape="1x128x2x16,causal,block=64,density=0.5", direction="forward", dtype="float32")
    plain, slow = (
        Paired.race(*gate.Gate(implementation=name, **about).programs(), rounds=8, round_seconds=0.001).ratio.median
        for name in ("xla", "slowed")
    )
    assert slow > 2 * plain


SLOWED = """
import time
import jax
from xsake.kernels_xla_ref import *
from xsake.kernels_xla_ref import forward as forward_

def forward(call, config):
    def wait(x):
        time.sleep(0.2)  # beside which a busy machine is quiet
        return x

    out, lse = forward_(call, config)
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(out.shape, out.dtype), out), lse
"""
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


def test_the_ratio_is_of_turns_of_one_round():
    ratio = two_trees.compared({"this": [1.0, 2.0, 4.0], "other": [2.0, 4.0, 8.0]})  # the chip slows down
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_bit_more_is_another_result(dtype):
    x = jnp.linspace(-1.0, 1.0, 4001).astype(dtype)
    width = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
    changed = np.array(x)
    changed.view(np.dtype(width))[17] ^= 1
    this, other = ([tree_runner.described(jnp.asarray(a))] for a in (x, changed))
    assert this[0]["bits"] != other[0]["bits"]
    assert two_trees.distance(this, this) == 0.0
    assert two_trees.distance(this, [tree_runner.described(-x)]) == pytest.approx(2.0)


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
