"""Fields of configurations: impossible values are refused everywhere, and old entries stay valid with new fields."""

from __future__ import annotations

import dataclasses
import re
import typing
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from tuning_fakes import KEY

import xsake
from xsake import kernels_xla_ref, tuning_db
from xsake._ground.fields import check_fields, flag, one_of, whole
from xsake._op import registry, tuned
from xsake._op.arguments import build_call
from xsake.tuning_db import Database, Entry

BACKENDS = ("xla", "mosaic_gpu", "triton", "mosaic_tpu")
NO_INT = (True, 10**30, 64.0, -64, "x", None, [64], float("nan"))
NO_INT_OR_NONE = tuple(value for value in NO_INT if value is not None)
IMPOSSIBLE = {int: NO_INT, int | None: NO_INT_OR_NONE, bool: (1, 0.0, "x", None), bool | None: (1, 0.0, "x")}
IMPOSSIBLE[typing.Literal["dynamic", "static"]] = (True, 3, "x", None)  # type: ignore[index]


def parts() -> dict[str, tuple[str, str, dict]]:
    x = jnp.ones((1, 256, 4, 128), jnp.bfloat16)
    mask = xsake.BlockMask.full(256, 256, block_q=64, block_kv=64, is_causal=True)
    call = build_call(x, x, x, mask, default_blocks=(64, 64))
    found = {}
    for name in BACKENDS:
        config = registry.get(name).default_config(call)
        for direction in tuned.directions(registry.get(name)):
            found[f"{name} {direction}"] = name, direction, dataclasses.asdict(getattr(config, direction))
    return found


PARTS = parts()


@pytest.mark.parametrize("which", PARTS)
def test_impossible_values_are_refused(unchecked_annotations, which):
    """The class itself refuses, and so do entries and callers."""
    name, direction, good = PARTS[which]
    backend = registry.get(name)
    part = tuned.make_part(backend, direction, good)
    assert dataclasses.asdict(part) == good
    for field, kind in typing.get_type_hints(type(part)).items():
        for value in IMPOSSIBLE[kind]:
            with pytest.raises(ValueError, match=rf"^{field}=.* must be (an int of at least|one of|True or False)"):
                tuned.make_part(backend, direction, good | {field: value})
            with pytest.raises(ValueError, match=rf"^{field}="):
                dataclasses.replace(part, **{field: value})


@pytest.mark.parametrize("name", BACKENDS)
def test_a_direction_must_be_a_configuration(unchecked_annotations, name):
    Config = registry.get(name).Config
    directions = {d: tuned.make_part(registry.get(name), d, PARTS[f"{name} {d}"][2]) for d in PARTS_OF[name]}
    assert Config(**directions)
    with pytest.raises(ValueError, match=r"^forward=\{\} must be a "):
        Config(**directions | {"forward": {}})


PARTS_OF = {name: [direction for n, direction, _ in PARTS.values() if n == name] for name in BACKENDS}


@pytest.mark.parametrize("registers", [-8, 23, 241, 264])
def test_registers_that_no_warpgroup_can_have(registers):
    good = PARTS["mosaic_gpu dq"][2]
    with pytest.raises(
        ValueError, match=r"memory_registers=.* must be an int of at least 24 and at most 256, and a multiple of 8"
    ):
        tuned.make_part(registry.get("mosaic_gpu"), "dq", good | {"memory_registers": registers})


def test_a_field_must_declare_its_values():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Careless:
        tile: int = 3

        def __post_init__(self) -> None:
            check_fields(self)

    with pytest.raises(TypeError, match=r"Careless\.tile must declare its values: use whole, one_of or flag"):
        Careless()


# -- entries of an older version ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grown:
    """An older version had only `tile`, and behaved as order="given" does now."""

    tile: int = whole(1, 64)
    order: str = one_of("given", "longest first", default="longest first", before="given")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrownCarelessly(Grown):
    fast: bool = flag(default=True)


def config_of(part: type) -> type:
    made = dataclasses.make_dataclass("Config", [("forward", part)], frozen=True, kw_only=True)
    made.__post_init__ = check_fields
    return made


@pytest.fixture
def backend(monkeypatch):
    """A fake backend under the name "xla", whose databases hold only the entries of an overlay."""

    def fake(part: type) -> SimpleNamespace:
        made = SimpleNamespace(**{name: getattr(kernels_xla_ref, name) for name in kernels_xla_ref.__all__})
        made.Config = config_of(part)
        made.default_config = lambda call: made.Config(forward=part(tile=1))
        made.misfit = lambda call, config: None
        monkeypatch.setattr(registry, "get", lambda name: made)
        tuning_db.lookup.warn_once.cache_clear()
        return made

    return fake


def choose(stored: dict) -> tuned.Choice:
    x = jnp.ones((1, 128, 2, 16))
    mask = xsake.patterns.causal(128, 128, block_q=32, block_kv=32)
    call = build_call(x, x, x, mask, default_blocks=(32, 32))
    with tuning_db.overlay(Database("cpu", [Entry(KEY, stored, {"source": "measured"})])):
        return tuned.choose("xla", call)


def test_an_entry_older_than_a_field_has_the_value_declared_for_it(backend, caplog):
    backend(Grown)
    assert choose({"tile": 8}).config.forward == Grown(tile=8, order="given")
    assert choose({"tile": 8, "order": "longest first"}).config.forward == Grown(tile=8)
    assert not caplog.records


def test_without_a_declared_value_the_entry_is_ignored_and_that_is_said_once(backend, caplog):
    backend(GrownCarelessly)
    for _ in range(2):
        assert choose({"tile": 8}).found == {"forward": None}
    (record,) = caplog.records
    assert re.search(
        r"ignored .* GrownCarelessly has the fields \['tile', 'order', 'fast'\], the entry has \['tile'\]",
        record.getMessage(),
    )


def test_a_field_that_no_longer_exists_is_not_dropped_in_silence(backend, caplog):
    backend(Grown)
    assert choose({"tile": 8, "gone": 1}).found == {"forward": None}
    assert "the entry has ['gone', 'tile']" in caplog.text
