"""What holds for every test: simulated devices, checked annotations, strict dtypes, Hypothesis profiles."""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Must be set before JAX is imported.
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
_FLAGS = {"xla_force_host_platform_device_count": 8}
if (
    _PROFILE == "ci"
):  # most of the time goes into LLVM; the same HLO is run, and the thorough profile optimises it as users do
    _FLAGS["xla_backend_optimization_level"] = 0
    _FLAGS["xla_cpu_parallel_codegen_split_count"] = 1  # the cores have tests of their own
for _name, _value in _FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_name}={_value}".strip()
os.environ["XSAKE_TUNING_DIR"] = str(Path(__file__).parent / "none")  # what a developer tuned changes no test
# A program is compiled once for all tests, workers and processes, and for the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")  # ten frames of every operation take a tenth of lowering
assert "jax" not in sys.modules, "JAX was imported before the tests could ask for simulated devices"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# importlib mode puts nothing on the path, and tests share the modules of this folder.
sys.path.insert(0, str(Path(__file__).parent))

# Annotations of shapes are checked here and cost users nothing; mypy checks the others. Not those of `Call`, in
# _backend: it is a tree, and JAX builds trees with flags, specs and cotangents where its annotations say arrays.
_SOURCE = Path(__file__).parents[1] / "src" / "xsake"
_FILES = [Path(folder) / name for folder, _, names in os.walk(_SOURCE, followlinks=True) for name in names]
_FILES = [path for path in sorted(_FILES) if path.suffix == ".py" and "jaxtyping" in path.read_text()]
_MODULES = [".".join(path.relative_to(_SOURCE.parent).with_suffix("").parts) for path in _FILES]
_MODULES = [name.removesuffix(".__init__") for name in _MODULES if name != "xsake.backend.contract"] + [
    "benchmarks.hads"
]
assert not any(name.split(".")[0] == "xsake" for name in sys.modules), (
    "xsake was imported before its annotations could be checked"
)
_HOOK = jaxtyping.install_import_hook(_MODULES, "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")

_SLOW_START = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "ci", max_examples=10, deadline=None, derandomize=True, suppress_health_check=_SLOW_START
)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None, suppress_health_check=_SLOW_START)
hypothesis.settings.load_profile(_PROFILE)

_FINISHED, _MOST_MAPS = itertools.count(1), 40_000


@pytest.fixture(autouse=True, scope="module")
def _ranks(request: pytest.FixtureRequest) -> None:
    """Rank promotion is an error, as in JAX's own tests, but for the studies of HADS, which no call runs.

    Set for all threads, since the studies compile in several; and per module, since a changed setting compiles anew.
    """
    allowed = request.path.name.startswith("test_hads_")
    jax.config.update("jax_numpy_rank_promotion", "allow" if allowed else "raise")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `implementation` runs on every one of targets.TARGETS."""
    if "implementation" in metafunc.fixturenames:
        import targets

        metafunc.parametrize("implementation", targets.parameters(metafunc.function.__name__))


# Names of tests that lower or interpret Mosaic GPU kernels.
_OF_HOPPER = re.compile(r"test_mosaic_|test_first_kernel|test_forward_softmax|test_delta|mosaic_gpu|hopper|-cuda-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels that an old JAX cannot run are not tested on it; that they are refused there is tested."""
    from xsake._ground import versions

    if reason := versions.lacking().get("mosaic_gpu"):
        for item in items:
            if _OF_HOPPER.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """No implementation is left out because JAX is old."""
    from xsake._ground import versions

    monkeypatch.setattr(versions, "lacking", dict)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """What a partial implementation refuses is skipped, with its reason."""
    from xsake._op import registry

    try:
        return (yield)
    except registry.Unsupported as refusal:
        target = pyfuncitem.callspec.params.get("implementation") if hasattr(pyfuncitem, "callspec") else None
        if getattr(target, "partial", False):
            pytest.skip(str(refusal))
        raise


def pytest_runtest_teardown() -> None:
    """Compiled programs are forgotten before the process runs out of memory maps, where XLA would crash.

    Linux allows 65530. To count them takes as long as a short test, so it is done now and then.
    """
    if next(_FINISHED) % 20 == 0 and _memory_maps() > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it again, and seldom at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def strict_tpu_interpreter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted TPU kernels fail on races too, not only on reads out of bounds and of memory never written."""
    from jax.experimental.pallas import tpu as pltpu

    from xsake.kernels_pallas_tpu import launch

    monkeypatch.setattr(launch, "interpreter", pltpu.InterpretParams(detect_races=True))
    yield
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in capsys.readouterr().out  # jax 0.11 prints it; newer ones raise


def _is_interpreted_tpu(request: pytest.FixtureRequest) -> bool:
    target = getattr(request.node, "callspec", None) and request.node.callspec.params.get("implementation")
    return bool(target) and target.interpret and target.name == "mosaic_tpu"


@pytest.fixture(autouse=True)
def _strict_target(request: pytest.FixtureRequest) -> None:
    if _is_interpreted_tpu(request):
        request.getfixturevalue("strict_tpu_interpreter")


@pytest.fixture
def interpreter_without_effects(
    _strict_target: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns off the strict interpreter, whose ordered callbacks are effects: jax.checkpoint allows no effects, and
    transfer guards take the tokens of ordered effects for transfers."""
    if _is_interpreted_tpu(request):
        from xsake.kernels_pallas_tpu import launch

        monkeypatch.setattr(launch, "interpreter", True)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Annotations are not checked, as for users: errors come from the package's own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
