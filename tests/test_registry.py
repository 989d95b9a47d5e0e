"""Which backend serves on which platform, and the reasons that are given."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import xsake
from xsake import kernels_raw_triton
from xsake._cli import app
from xsake._ground import versions as ground_versions
from xsake._op import attention as attention_op
from xsake._op import plugins, registry
from xsake._op.arguments import build_call
from xsake._op.fold import Fold
from xsake._op.run import Runner
from xsake.backend.contract import Backend, Call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.triton import backend as triton
from xsake.kernels_raw_triton import versions

lacking = ground_versions.lacking


@pytest.fixture
def gpu(any_jax, monkeypatch):
    """Pretend that calls run on a GPU of the given compute capability."""

    def pretend(capability: str) -> None:
        monkeypatch.setattr(attention_op, "platform_of", lambda x: "gpu")
        for module in (mosaic, triton, kernels_raw_triton):
            monkeypatch.setattr(module, "compute_capability", lambda: capability)
        monkeypatch.setattr(versions, "_version", {}.get)  # jax-triton is not installed

    return pretend


def test_best_first():
    assert list(xsake.implementations())[:5] == ["mosaic_gpu", "raw_triton", "triton", "mosaic_tpu", "xla"]


@pytest.mark.parametrize(
    "capability, expected",
    [
        ("9.0", ["mosaic_gpu", "triton", "xla"]),
        ("8.0", ["triton", "xla"]),
        ("10.0", ["triton", "xla"]),
        ("7.5", ["xla"]),
    ],
)
def test_a_gpu_gets_the_best_that_it_can_run(gpu, capability, expected):
    gpu(capability)
    assert registry.candidates(None, "gpu")[: len(expected)] == expected


def test_an_old_jax_leaves_out_what_it_cannot_run(gpu, monkeypatch):
    """Hopper then gets the Triton backend; `xsake info` says why."""
    gpu("9.0")
    monkeypatch.setattr(ground_versions, "lacking", lacking)
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert registry.candidates(None, "gpu")[:2] == ["triton", "xla"]
    with pytest.raises(NotImplementedError, match=r"it needs jax 0\.11\.2 or newer, and jax 0\.10\.2 is installed"):
        registry.candidates("mosaic_gpu", "gpu")
    said = CliRunner().invoke(app, ["info"], env={"COLUMNS": "200"}).output
    assert "mosaic_gpu cannot run here: it needs jax 0.11.2 or newer" in said


def test_the_oldest_jax_is_the_same_everywhere():
    root = Path(__file__).parents[1]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = {text.split(">=")[1].split(",")[0] for text in wanted if text.startswith("jax") and "typing" not in text}
    (version,) = oldest
    assert f"JAX {version} or newer" in (root / "docs" / "getting_started.md").read_text()
    assert f"JAX {version} or newer" in (root / "README.md").read_text()
    assert f"make test JAX={version}`" in (root / "CONTRIBUTING.md").read_text()


def test_an_old_gpu_gets_xla_and_is_told_so_once(gpu, caplog):
    gpu("7.5")
    registry._say_once.cache_clear()
    q = jnp.ones((1, 64, 1, 16))
    with caplog.at_level(logging.WARNING, logger="xsake"):
        xsake.attention(q, q, q)
        xsake.attention(q, q, q)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert "plain XLA" in messages[0] and "7.5" in messages[0] and "triton" in messages[0]


def test_float32_on_hopper_goes_to_triton(gpu):
    gpu("9.0")

    def chosen(dtype):
        names = registry.candidates(None, "gpu")
        from tests.test_mosaic_lowering import make_call

        return registry.choose(names, make_call(dtype=dtype))

    assert chosen(jnp.bfloat16) == "mosaic_gpu"
    assert chosen(jnp.float32) == "triton"


def test_blocks_that_hopper_has_no_kernel_for_are_said_once(gpu, caplog):
    gpu("9.0")
    registry._say_once.cache_clear()
    from tests.test_mosaic_lowering import make_call

    names = registry.candidates(None, "gpu")
    with caplog.at_level(logging.WARNING, logger="xsake"):
        chosen = [registry.choose(names, make_call(block_q=32, block_kv=64)) for _ in range(2)]
        chosen += [registry.choose(names, make_call(**given)) for given in (dict(block_kv=16), dict(dtype=jnp.float32))]
    assert chosen == ["triton", "triton", "mosaic_gpu", "triton"]
    (message,) = [r.getMessage() for r in caplog.records]
    assert "blocks of 32 x 64 run on 'triton'" in message and "mask.block_q=32 must be a multiple of 64" in message


def test_nothing_is_said_on_a_cpu(caplog):
    if jax.default_backend() != "cpu":
        pytest.skip("this process has an accelerator")
    q = jnp.ones((1, 64, 1, 16))
    with caplog.at_level(logging.WARNING, logger="xsake"):
        xsake.attention(q, q, q)
    assert not caplog.records


# -- what a backend honours --------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CallOfTomorrow(Call):
    """`Call` with optional fields that no backend has heard of."""

    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})
    temperature: jax.Array | None = dataclasses.field(default=None, metadata={"shared_batch": True})


def call_of_tomorrow(batch=2, **fields):
    q = jnp.ones((batch, 64, 1, 16))
    call = build_call(q, q, q, None, default_blocks=(64, 64))
    given = {field.name: getattr(call, field.name) for field in dataclasses.fields(Call)}
    return CallOfTomorrow(**given, **fields)


@pytest.mark.parametrize("name", registry._BACKENDS)
def test_a_field_that_a_backend_does_not_know_is_refused_by_name(name):
    assert not {"dropout", "temperature"} & set(call_of_tomorrow().uses())
    for field, value in (("dropout", 0.1), ("temperature", jnp.ones(1))):
        with pytest.raises(NotImplementedError, match=rf"'{name}': it does not honour {field}"):
            registry.choose([name], call_of_tomorrow(**{field: value}))


def test_a_call_goes_to_the_first_that_honours_all_of_it(monkeypatch):
    monkeypatch.setattr(triton, "HONOURS", triton.HONOURS - {"soft_cap"})
    q = jnp.ones((1, 64, 1, 16))
    for cap, expected in ((None, "triton"), (5.0, "xla")):
        call = build_call(q, q, q, None, default_blocks=(64, 64), logits_soft_cap=cap)
        assert registry.choose(["triton", "xla"], call) == expected
    with pytest.raises(NotImplementedError, match="'triton': it does not honour logits_soft_cap"):
        registry.choose(["triton"], call)


def test_vmap_folds_every_array_of_a_call():
    """Also a field that is added to `Call` later: its declaration says how it is folded."""
    call = call_of_tomorrow(temperature=jnp.ones((1, 3)))
    mapped = jax.tree.map(lambda _: False, call)
    shared = Fold.of(5, call, mapped).call(call, mapped)
    assert shared.temperature.shape == (1, 3)
    assert shared.query.shape == (10, 64, 1, 16) and shared.mask.batch == 1
    call, mapped = (dataclasses.replace(x, temperature=y) for x, y in ((call, jnp.ones((5, 2, 3))), (mapped, True)))
    assert Fold.of(5, call, mapped).call(call, mapped).temperature.shape == (10, 3)


def test_a_permission_is_asked_of_no_backend():
    assert dataclasses.replace(call_of_tomorrow(), deterministic=False).uses() == call_of_tomorrow().uses()


def test_a_field_without_a_gradient_is_refused_by_name():
    runner = Runner.of(["xla"], call_of_tomorrow(), None)
    with pytest.raises(NotImplementedError, match="no gradient with respect to temperature"):
        jax.grad(lambda t: attention_op._attend(runner, call_of_tomorrow(temperature=t))[0].sum())(jnp.ones((1, 3)))


@pytest.mark.parametrize("name", registry._BACKENDS)
def test_a_backend_has_the_names_and_the_parameters_of_the_protocol(name):
    backend = registry.get(name)
    assert isinstance(backend, Backend)
    assert plugins.problem(backend) is None
