"""`make kernel`: what it knows, what it says, and how kernels are told apart."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from rich.console import Console
from sweep import sweep

from tests import machine_code, try_kernel
from tests.cuda_offline import lower
from tests.kernels import KERNELS
from tests.machine_code import Kernel


@pytest.mark.parametrize("name", sweep(KERNELS, slow=["dq", "dkv", "fused", "gathered", "tpu", "raw_triton"]))
def test_every_kernel_is_found_in_its_programs(name):
    entry = KERNELS[name]
    longer = [call for call in entry.calls if "than slots" in call]  # finds slots that are freed too early
    streams = name in ("first", "forward", "dq", "dkv", "fused")
    assert (try_kernel.ROOT / entry.room).exists() and len(entry.calls) == 3 + streams and len(longer) == streams
    if entry.needs is None:
        found = [k for program in try_kernel._lowered(entry) for k in machine_code.lowered(program)]
        assert any(entry.of in kernel.name and len(kernel.instructions) > 100 for kernel in found)


def scaled(factor):
    """A Triton kernel that multiplies by a number."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * factor if factor else x_ref[...]

    out = jax.ShapeDtypeStruct((64,), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=out, compiler_params=plgpu.CompilerParams(), name="scaled")
    return lower(call, jnp.zeros(64))


def test_lowered_kernels_are_told_apart():
    (this,), (same,), (other,), (less,) = (machine_code.lowered(scaled(factor)) for factor in (2.0, 2.0, 3.0, None))
    assert this.name == "scaled" and this.registers is None
    assert machine_code.difference(this, same) == "the same"
    assert machine_code.difference(other, this) == "in another order, or other operands"
    assert "-1 arith.mulf" in machine_code.difference(less, this)
    assert machine_code.row(this, same)[1:3] == ("?", "?")


def test_without_a_kernel_it_lists_them(monkeypatch, capsys):
    for given, code in ([], 0), (["no_kernel"], 2):
        monkeypatch.setattr("sys.argv", ["try_kernel", *given])
        assert try_kernel.main() == code
        said = capsys.readouterr().out
        assert all(name in said for name in KERNELS) and ("There is no kernel 'no_kernel'" in said) == bool(given)


@pytest.mark.parametrize("wrong", [False, True])
def test_it_says_what_is_right_and_what_changed(monkeypatch, capsys, wrong):
    def run(arguments):
        assert not (wrong and arguments["density"] == 0.0), "out: 3 of 64 differ"

    entry = dataclasses.replace(KERNELS["first"], run=run, calls={"one": dict(density=1.0), "empty": dict(density=0.0)})
    monkeypatch.setitem(try_kernel.KERNELS, "first", entry)
    before = {"first_forward": Kernel("first_forward", ("FADD R1", "FMUL R2"), 32, 0)}
    after = {"first_forward": Kernel("first_forward", ("FADD R1", "FMUL R2", "FADD R3"), 40, 8)}
    monkeypatch.setattr(try_kernel.Compiler, "both", lambda self, against: (after, before))
    assert try_kernel.try_kernel("first", "HEAD", "python", Console(width=120)) == wrong
    said = capsys.readouterr().out
    assert "one ... right" in said and ("WRONG: AssertionError: out: 3 of 64 differ" in said) == wrong
    assert all(part in said for part in ("2 -> 3", "32 -> 40", "0 -> 8", "+1 FADD"))


def test_a_commit_is_compiled_once(monkeypatch, tmp_path):
    compiled = []

    def kernels(self, root):
        compiled.append(root)
        return {"dq": Kernel("dq", ("FADD R1",), 32, 0)}

    monkeypatch.setattr(try_kernel, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(try_kernel.Compiler, "kernels", kernels)
    compiler = try_kernel.Compiler("dq", "python")
    commit = try_kernel.commit_of("HEAD")
    first, again = compiler.kernels_of_commit(commit), compiler.kernels_of_commit(commit)
    assert first == again and len(compiled) == 1
    with pytest.raises(SystemExit, match="no-such-commit is neither"):
        try_kernel.commit_of("no-such-commit")
