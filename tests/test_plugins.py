"""Backends of other packages: found, named where they are broken, and treated as our own."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from rich.console import Console

import xsake
from xsake._cli import info
from xsake._op import plugins, registry, tuned
from xsake._op.kernel_hash import kernel_hash
from xsake.backend import Call

NAMES = (
    "HONOURS, Config, backward, default_blocks, default_config, forward, misfit, search_space, unavailable, unsupported"
)
WHOLE = f"from xsake.kernels_xla_ref import {NAMES}\n"
_number = itertools.count()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a backend into a file: the XLA backend, and `more` after it."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def written(more="", whole=WHOLE):
        path = tmp_path / f"plugged_{next(_number)}.py"
        path.write_text(whole + more)
        return path

    yield written
    for name in set(sys.modules) - before:
        if name.startswith("plugged_"):
            del sys.modules[name]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with entry points, as pip does."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(plugins, "installed", plugins.cache(plugins.installed.__wrapped__))
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, points):
        folder = tmp_path / f"{package}-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        (folder / "entry_points.txt").write_text(
            "[xsake.backends]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        )

    return install


def arrays(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 16)).astype(dtype)


def call(name, **options):
    return xsake.attention(*arrays(), implementation=name, **options)


def test_a_file_becomes_an_implementation(write):
    path = write()
    xsake.register_backend("mine", path)
    assert xsake.implementations()["mine"] is None
    np.testing.assert_array_equal(call("mine", is_causal=True), call("xla", is_causal=True))
    assert re.fullmatch("[0-9a-f]{16}", tuned.kernel_hash("mine"))
    assert registry.registrations() == [("mine", str(path), None)]
    xsake.register_backend("mine", path)  # the same again
    with pytest.raises(ValueError, match="in this process already"):
        xsake.register_backend("mine", write())
    with pytest.raises(ValueError, match=r"must be None or one of \['mine', 'mosaic_gpu'"):
        call("yours")


def test_the_hash_of_a_file_does_not_depend_on_its_folder(write, tmp_path):
    first = write("# here\n")
    (tmp_path / "inner").mkdir()
    moved = tmp_path / "inner" / first.name
    moved.write_text(WHOLE)
    hashes = []
    for path in (first, moved):
        sys.modules.pop(path.stem, None)
        sys.path.insert(0, str(path.parent))
        hashes.append(kernel_hash(plugins.load(str(path))))
    assert hashes[0] == hashes[1]


def test_calls_without_a_name_try_it_only_where_that_is_asked_for(write, caplog):
    xsake.register_backend("unasked", write())
    xsake.register_backend("first", write("HONOURS = HONOURS - {'soft_cap'}\n"), before="xla")
    assert registry.candidates(None, "cpu") == ["first", "xla"]
    with caplog.at_level("INFO", logger="xsake"):
        call(None)
        call(None, logits_soft_cap=2.0)
    assert "runs on 'first'" in caplog.messages[0]
    assert "runs on 'xla'; not 'first': it does not honour logits_soft_cap" in caplog.messages[1]


BROKEN = {
    "has no Config, HONOURS, backward, default_blocks": dict(whole="forward = len\n"),
    "does not import: ModuleNotFoundError: No module named 'nothing_such' (": dict(more="import nothing_such\n"),
    ".py:2)": dict(more="raise SystemExit(3)\n"),
    "HONOURS names windows, which no call has": dict(more="HONOURS = HONOURS | {'windows'}\n"),
    "HONOURS must be a frozenset of names; it is a list": dict(more="HONOURS = ['bias']\n"),
    "Config must be a frozen dataclass": dict(more="Config = dict\n"),
    "forward(call) must be forward(call, config)": dict(more="def forward(call): ...\n"),
    "written for version 99 of xsake.backend": dict(more="CONTRACT = 99\n"),
    "PLATFORM='cpu' must be one of (None, 'gpu', 'tpu')": dict(more="PLATFORM = 'cpu'\n"),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_backend_is_named_in_one_line_and_harms_nothing_else(write, says):
    path = write(**BROKEN[says])
    xsake.register_backend("broken", path)
    reason = xsake.implementations()["broken"]
    assert says in reason and str(path) in reason and "\n" not in reason
    with pytest.raises(
        NotImplementedError, match=re.escape(f"implementation='broken' is not available here: {reason}")
    ):
        call("broken")
    assert call(None).shape == (1, 32, 2, 16)


def test_questions_that_raise_are_reasons(write, caplog):
    """Where another program lists backends, or tries this one before another."""
    path = write("def unavailable():\n    raise OSError('no\\nlibrary')\n")
    xsake.register_backend("asked", path)
    assert xsake.implementations()["asked"] == f"its unavailable() raised OSError: no ({path}:3)"
    xsake.register_backend("first", write("def unsupported(call):\n    return call.nothing\n"), before="xla")
    with caplog.at_level("INFO", logger="xsake"):
        call(None)
    assert "runs on 'xla'; not 'first': its unsupported() raised AttributeError" in caplog.text


def test_a_mask_that_may_overflow_is_refused_as_that(write):
    xsake.register_backend("without", write("HONOURS = HONOURS - {'sink_lse'}\n"))

    def attend(blocks):
        mask = xsake.BlockMask.from_blocks(blocks, block_q=8, block_kv=8, q_len=32, kv_len=32, capacity=3)
        return call("without", mask=mask)

    with pytest.raises(NotImplementedError, match="does not honour a mask that is built under jit and may"):
        jax.eval_shape(attend, jnp.ones((1, 1, 4, 4), bool))
    with pytest.raises(NotImplementedError, match="'without': it does not honour sinks"):
        call("without", sinks=jnp.ones(2))


def test_a_platform_is_needed_as_of_our_own(write):
    xsake.register_backend("far", write("PLATFORM = 'tpu'\n"))
    if jax.default_backend() != "tpu":
        assert "it needs a TPU, and this call runs on" in xsake.implementations()["far"]


LIES = {
    r"gave out as \[1, 2, 32, 16\] in float32; it must be \[1, 32, 2, 16\] in float32 or wider": (
        "forward",
        "return forward_(call, config)[0].swapaxes(1, 2), forward_(call, config)[1]",
    ),
    r"gave lse as \[1, 2, 32\] in bfloat16; it must be \[1, 2, 32\] in float32 or wider": (
        "forward",
        "return forward_(call, config)[0], forward_(call, config)[1].astype('bfloat16')",
    ),
    "gave a NoneType; it must give out, lse": ("forward", "return None"),
    "gave 3 results; it must give the gradient of query, the gradient of key": (
        "backward",
        "return d_out, d_out, d_out",
    ),
    r"gave the gradient of key as \[1, 32, 1, 16\] in float32; it must be \[1, 32, 2, 16\] in float32": (
        "backward",
        "g = backward_(call, config, lse, delta, d_out, with_bias=with_bias); return g[0], g[1][:, :, :1], *g[2:]",
    ),
}


@pytest.mark.parametrize("says", LIES)
def test_results_of_other_shapes_and_types_are_refused_by_name(write, says):
    which, body = LIES[says]
    parameters = "call, config" + (", lse, delta, d_out, *, with_bias" if which == "backward" else "")
    xsake.register_backend("liar", write(f"{which}_ = {which}\ndef {which}({parameters}):\n    {body}\n"))
    query, key, value = arrays()
    with pytest.raises(TypeError, match=f"implementation 'liar' {says}"):
        jax.eval_shape(jax.grad(lambda key: xsake.attention(query, key, value, implementation="liar").sum()), key)


def test_an_entry_point_is_an_implementation(write, installed):
    installed("good-kernels", {"entered": write().stem})
    assert xsake.implementations()["entered"] is None
    assert call("entered").shape == (1, 32, 2, 16) and registry.registrations() == []
    said = Console(record=True, width=200)
    info.show(said)
    assert "entered (good-kernels 0.1)" in said.export_text()


def test_entry_points_that_cannot_be_used(write, installed, caplog):
    installed("one", {"twice": write().stem, "xla": write().stem, "dense": write().stem, "gone": "no_such_module"})
    installed("two", {"twice": write().stem})
    registry._say_once.cache_clear()
    reasons = xsake.implementations()
    assert "one 0.1 and two 0.1 both name" in reasons["twice"] or "two 0.1 and one 0.1 both name" in reasons["twice"]
    assert "no_such_module of one 0.1 does not import: ModuleNotFoundError" in reasons["gone"]
    assert reasons["xla"] is None and "one 0.1 names a backend 'xla', which is XSAKE's own" in caplog.text
    assert "dense" not in reasons and "'dense', which is a contestant of `xsake race`: it is not used" in caplog.text


def test_names_that_cannot_be_registered(write):
    for name, module, says in (
        ("fa4", write(), "a contestant of `xsake race`"),
        ("xla", write(), "XSAKE's own"),
        ("my kernel", write(), "must be an identifier"),
        ("mine", "no/such/file.py", "there is no file no/such/file.py"),
    ):
        with pytest.raises(ValueError, match=says):
            xsake.register_backend(name, module)
    with pytest.raises(ValueError, match="before='cudnn' must be None or one of"):
        xsake.register_backend("mine", write(), before="cudnn")


def names_of_rows(text):
    """The names in code in the first column of its tables, without parentheses and arguments."""
    return re.findall(r"`(\w+)(?:\([^`]*\))?`", "".join(re.findall(r"^\|([^|]+)\|", text, re.MULTILINE)))


def test_the_contract_is_documented_field_by_field():
    text = (pages.ROOT / "docs/api/backends.md").read_text().partition("field by field")[2].partition("```")[0]
    fields, names = text.split("### The mask")
    of_mask, names = names.split("These of a `Band` are")
    of_band, imported = names.split("### What a backend imports")
    assert names_of_rows(fields) == [f.name for f in dataclasses.fields(Call)]
    assert all(f"`{name}`" in fields for name, of in vars(Call).items() if isinstance(of, property))
    mask = xsake.patterns.causal(32, 32, block_q=16, block_kv=16)
    assert [name for name in names_of_rows(of_mask) if not hasattr(mask, name)] == []
    assert [name for name in names_of_rows(of_band) if not hasattr(mask.band, name)] == []
    assert set(names_of_rows(imported)) == set(xsake.backend.__all__)
    code = code_of_backends()
    assert "mask.kv_indices" in code
    assert set(re.findall(r"\bmask\.(\w+)", code)) - set(names_of_rows(of_mask)) == set()
    assert set(re.findall(r"\bband\.(\w+)", code)) - set(names_of_rows(of_band)) == set()
    of_call = set(re.findall(r"\bcall\.(\w+)", code))
    assert {name for name in of_call if not re.search(rf"`{name}(\(\))?`", fields)} == set()


def code_of_backends():
    """The code of XSAKE's backends, of the examples and of `xsake new-kernel`, without imports."""
    folders = [pages.ROOT / name for name in ("examples/simple_kernel", "examples/jax_mosaic", "kernels_pallas_gpu")]
    folders += [pages.ROOT / name for name in ("kernels_pallas_tpu", "src/xsake/kernels_raw_triton")]
    files = [path for folder in folders for path in folder.rglob("*.py") if "tests" not in path.parts]
    files += (pages.ROOT / "src/xsake/_cli/kernel_template").glob("*.txt")
    files.append(pages.ROOT / "kernels_xla_ref/block_sparse.py")
    lines = "\n".join(path.read_text() for path in files).splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s*(from|import) ", line))


def test_the_names_of_the_contract():
    assert {name for name in xsake.backend.__all__ if not hasattr(xsake.backend, name)} == set()
