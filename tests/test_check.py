"""`xsake check`: what it finds in kernels that are wrong in one way or another, and the calls that it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from functools import partial
from pathlib import Path

import jax
import pytest
from rich.console import Console
from test_plugins import NAMES, WHOLE
from typer.testing import CliRunner

import xsake
from xsake._cli import app
from xsake._cli.check import _tell_findings
from xsake._measure import isolation
from xsake._measure.isolation import Died, Hung
from xsake._op import registry
from xsake.testing import assert_holds, smallest, target_of
from xsake.testing.case import make, run
from xsake.testing.checks import CHECKS, Check, NotHere, four_times, vmapped
from xsake.testing.runner import PARTS, Checkers, checklist
from xsake.testing.target import Target
from xsake.testing.verdict import Verdict, judge

RENAMED = f"from xsake.kernels_xla_ref import backward as backward_, forward as forward_, {NAMES}\n"
FORWARD = "def forward(call, config):\n    out, lse = forward_(call, config)\n    "
BACKWARD = (
    "def backward(call, config, lse, delta, d_out, *, with_bias):\n"
    "    d_query, d_key, d_value, d_bias = backward_(call, config, lse, delta, d_out, with_bias=with_bias)\n    "
)
EXAMPLE = Path(__file__).resolve().parents[1] / "examples/simple_kernel/simple_kernel/backend.py"
BOTH = frozenset(PARTS)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write the XLA backend with a fault, and give its target."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(fault, whole=RENAMED):
        path = tmp_path / f"planted_{tmp_path.name.strip('_').replace('-', '_')}.py"
        path.write_text(whole + fault)
        return path

    yield write
    smallest._difference.cache_clear()


def small(**options) -> Check:
    sizes = dict(q_len=16, batch=1, q_heads=1, kv_heads=1, mask=None)
    return Check(group="a", name="small call", case=partial(make, **sizes | options))


def target(path) -> Target:
    return target_of(registry.name_of(str(path)))


def printed(code: str) -> float:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return float(out.getvalue())


@pytest.fixture
def edited(planted):
    """Write a copy of the example with one line changed."""

    def write(old, new):
        text = EXAMPLE.read_text()
        assert text.count(old) == 1
        return planted("", whole=text.replace(old, new))

    return write


@pytest.fixture
def told(monkeypatch):
    """What `xsake check --quick` says of a wrong backend, and the call that it shows; without processes of its own."""
    monkeypatch.setattr(isolation, "Worker", isolation.InProcess)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the command adds some
    monkeypatch.setattr(smallest, "SECONDS", 600.0)  # on a machine that others use

    def check(path, only):
        words = ["check", str(path), "--quick", "--only", only]
        said = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
        assert said.exit_code == 1, said.output
        code = re.search(r"\n\n(import .*?)\n\n", said.output, re.DOTALL)[1]
        lines = code.splitlines()
        assert len(lines) <= 5 and lines[1] == f'xsake.register_backend("{path.stem}", "{path}")', code
        return said.output, code

    return check


def test_a_wrong_scale_in_the_gradient_of_keys(edited, told):
    right = '"bhts,bthd->bshd", d_logits, query)) * call.scale'
    said, code = told(edited(right, f"{right} * 1.4427"), "determinism")
    assert "d_key: max error" in said and printed(code) > 1e-3
    assert "mask" not in code and "(3, 1, 16, 1, 24)" in code


def test_a_window_that_is_off_by_one(edited, told):
    right = "call.band.allows_position(q_position[:, None, None], kv_position[..., None, :])"
    said, code = told(edited(right, right.replace("kv_position", "(kv_position + 1)")), "rules,forward")
    assert "out: max error" in said and printed(code) > 1e-3
    assert "local_window_size=" in said


UNGUARDED = """
import numpy

class _Tile:
    turns = 0

    def read(self, rows):
        self.turns += 1
        found = numpy.array(rows)
        if self.turns % 2 == 0:
            found[3] = 0  # this call's copy has not landed yet
        return found

_TILE = _Tile()
"""


def test_a_race(planted, told):
    """A tile that is read without waiting for its copy: right in the first run, and wrong in the next."""
    right = "    return out.swapaxes(0, 1).astype"
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    path = planted(UNGUARDED, whole=text.replace(right, f"    out = jax.pure_callback(_TILE.read, out, out)\n{right}"))
    said, code = told(path, "determinism")
    assert "out differs between two runs of one program" in said
    assert printed(code) > 1e-3


FAULTS = {
    "NaN": (f"{FORWARD}return out.at[0, 3].set(float('nan')), lse", "out: 16 of 256 elements are not finite"),
    "a wrong shape": (f"{FORWARD}return out[..., :1], lse", "raises TypeError: implementation"),
    "an error": (f"{FORWARD}raise IndexError('tile 3\\nof 2')", "raises IndexError: tile 3"),
    "an assertion without words": (f"{FORWARD}assert lse.ndim == 7", "raises AssertionError"),
    "zeros": (f"{FORWARD}return out, lse * 0", "lse: max error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_forward_are_plain_findings(planted, fault):
    body, says = FAULTS[fault]
    verdict = judge(target(planted(body)), small(), frozenset({"forward"}))
    assert verdict.forward.startswith(says) and "\n" not in verdict.forward and verdict.gradients is None
    assert verdict.ended == says.startswith("raises")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_error_of_the_kernel_is_told_with_its_line(planted, part):
    """The kernel's own line, which an error inside JAX led through; in pytest, its traceback too."""
    path = planted({"forward": FORWARD, "backward": BACKWARD}[part] + "assert jax.numpy.ones(3).reshape(2).ndim, 'no'")
    path.write_text(f"import jax\n{path.read_text()}")
    at = target(path)
    said = judge(at, small(), BOTH).at
    lines = path.read_text().splitlines()
    assert said == f"{path}:{len(lines)}, in {part}: assert jax.numpy.ones(3).reshape(2).ndim, 'no'"
    with pytest.raises(AssertionError, match="raises TypeError: cannot reshape") as found:
        assert_holds(at, small())
    assert isinstance(found.value.__cause__, TypeError) and said in str(found.value)


def test_what_this_machine_cannot_run_is_no_refusal():
    def elsewhere(target, case):
        raise NotHere("there is one device")

    verdict = judge(Target("xla"), dataclasses.replace(small(), how=elsewhere), BOTH)
    assert (verdict.refused, verdict.not_here) == (None, "there is one device")


@pytest.mark.parametrize("fault", ["an error", "an assertion without words"])
def test_gradients_alone_do_not_hold_where_the_forward_raises(planted, fault):
    body, says = FAULTS[fault]
    verdict = judge(target(planted(body)), small(), frozenset({"gradients"}))
    assert verdict.gradients.startswith(says) and verdict.forward is None and verdict.results == ("out",)


def test_gradients_that_raise_leave_the_forward_s_verdict(planted):
    verdict = judge(target(planted(f"{BACKWARD}raise ValueError('no')")), small(), BOTH)
    assert verdict.forward is None and verdict.gradients == "raises ValueError: no"


@pytest.mark.parametrize("how", [run, four_times, vmapped])
def test_a_backend_without_gradients_says_so(planted, how):
    check = dataclasses.replace(small(mask=(1, 1)), how=how)
    verdict = judge(target(planted(f"{BACKWARD}raise NotImplementedError('dense alone\\nhas them')")), check, BOTH)
    assert verdict.holds and verdict.no_gradients == "dense alone"


def test_a_wrong_backward_leaves_the_forward_alone_right(planted):
    check = dataclasses.replace(small(mask=(1, 1)), how=four_times)
    assert judge(target(planted(f"{BACKWARD}raise ValueError('no')")), check, frozenset({"forward"})).holds


def test_what_is_not_claimed_is_refused_by_name(planted):
    path = planted("HONOURS = frozenset({'band'})")
    at = target(path)
    assert judge(at, small(logits_soft_cap=2.0), BOTH).refused == "it does not honour logits_soft_cap"
    assert judge(at, small(sinks=(1,)), BOTH).refused == "it does not honour sinks"


class Broken:
    """A process that never answers well; a third check is wrong, and hangs in smaller calls."""

    restarts = 0

    def __init__(self, factory):
        wrong = Verdict(forward="out: wrong", results=("out",))
        hung, died = Hung("check did not end within 5 s"), Died("the process ended with exit code -11")
        self._answers = iter((hung, died, wrong, hung))

    def call(self, method, *arguments, limit):
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        pass


def test_a_kernel_that_hangs_or_ends_the_process_is_a_finding_and_the_rest_runs():
    checkers = Checkers("xla", quick=True, limit=5.0, start=Broken)
    planned = checklist(Target("xla"), quick=True, only=["vmap", "meshes", "bias"])
    (_, hung), (check, died), (_, wrong) = checkers.run(planned)
    assert hung.forward == hung.gradients == "check did not end within 5 s; --limit allows more"
    assert "exit code -11" in died.forward
    assert wrong.forward == "out: wrong" and "run(target_of" in wrong.code
    assert died.code.splitlines()[-1] == f'CHECKS["{check.title}"].run(target_of("xla"))'


def test_the_signal_that_ended_a_process_is_named():
    assert isolation._signal(-11) == " (SIGSEGV)"
    assert not isolation._signal(7) and not isolation._signal(0) and not isolation._signal(None)


def test_checks_that_end_the_process_alike_are_one_finding(capsys):
    first, second, other = list(CHECKS.values())[:3]
    died = "the process ended during check with exit code -11 (SIGSEGV)"
    _tell_findings(
        Console(),
        {
            first: Verdict(forward=died, code="first"),
            second: Verdict(forward=died, code="second"),
            other: Verdict(forward="out: wrong", results=("out",), code="other"),
        },
    )
    said = capsys.readouterr().out
    assert f"{first.title} and 1 more" in said and said.count(died) == 1
    assert "second" not in said and "other" in said


def test_sizes_that_suit_a_backend(any_jax, planted):
    assert target(planted("HONOURS = frozenset()")).dtypes == Target("xla").dtypes  # no causal call either
    assert target_of("xla") == Target("xla")
    assert target_of("mosaic_tpu") == Target("mosaic_tpu", interpret=jax.default_backend() != "tpu")


def test_the_command(planted, tmp_path):
    """In processes of their own: one check of a file that is right."""
    path = tmp_path / "right_kernel.py"
    path.write_text(WHOLE)
    said = CliRunner().invoke(app, ["check", str(path), "--quick", "--only", "forward,vmap"], env={"COLUMNS": "150"})
    assert said.exit_code == 0, said.output
    assert "right_kernel: 1 of 1 checks hold" in said.output and "vmap: a mask per example" in said.output


def test_wrong_words(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "Worker", isolation.InProcess)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    path = tmp_path / "no_backend.py"
    path.write_text("forward = 1\n")
    for words, says in (
        (["nothing"], "implementation='nothing' is unknown"),
        (["no/such.py"], "there is no file no/such.py"),
        ([str(path)], "is no backend: it has no Config, HONOURS, backward"),
        ([f"{path.parent}/"], "is a folder: give the file of a backend"),
    ):
        said = CliRunner().invoke(app, ["check", *words])
        assert said.exit_code == 1 and says in said.output, said.output
    with pytest.raises(ValueError, match=r"\['heights'\] is unknown; there are forward, gradients, masks"):
        checklist(Target("xla"), quick=True, only=["heights"])


def test_every_kind_of_check_is_quick_once():
    assert {c.group for c in CHECKS.values()} == {c.group for c in CHECKS.values() if c.quick}
    few = xsake.testing.checks_of(Target("xla", dtypes=("bfloat16",)), quick=True)
    assert 20 < len(few) < len(CHECKS) / 2 and all(c.dtype in (None, "bfloat16") for c in few)
