"""`hads.select` over a mesh of simulated devices: the mask of one device, block for block."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweep import sweep

from xsake import BlockMask, hads
from xsake._ground.trace import interpret
from xsake.hads.mask.lists import compact
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection import program
from xsake.hads.selection.cut import TOGETHER, Cut
from xsake.hads.selection.devices.partitioned import partitioned
from xsake.hads.selection.given import Given

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LENGTH = 256
CALLS: dict[str, dict[str, Any]] = {
    "for inference": {"transpose": False},
    "with gradients": {},
    "a mask per KV head": {"per": "kv_head"},
    "a number per head": {"mode": "static"},
    "a threshold": {"mode": "elastic"},
    "equal counts": {"shards": 4, "order": "zigzag"},
    "equal counts per head": {"shards": 4, "mode": "static"},
}
QUICK = {"for inference"}
KV_HEADS = [4, 2, 1]  # sharded like the query heads; a KV head for two shards; one for all


def mesh_of(kind: AxisType, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def inputs(kv_heads: int) -> tuple[Any, jax.Array, jax.Array]:
    profile = case.random_profile(q_heads=8, kv_heads=kv_heads, head_dim=16)
    return profile, *map(jnp.asarray, case.random_inputs(1, LENGTH, profile, batch=4))


@cache
def on_one_device(kv_heads: int, name: str) -> BlockMask:
    profile, query, key = inputs(kv_heads)
    return jax.jit(partial(hads.select, profile=profile, budget=0.5, layer=1, **CALLS[name]))(query, key)


def on(mesh: jax.sharding.Mesh, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query and key over batch and heads; KV heads that cannot be divided are on every device."""
    heads = "model" if key.shape[2] % mesh.shape["model"] == 0 else None
    places = (NamedSharding(mesh, P("data", None, axis, None)) for axis in ("model", heads))
    return tuple(jax.device_put(x, place) for x, place in zip((query, key), places, strict=True))


def assert_same(got: BlockMask, wanted: BlockMask) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(g, w), jax.tree_util.keystr(path)


def assert_same_blocks(got: Any, wanted: Any) -> None:
    """Blocks, or lists of blocks."""
    if isinstance(got, tuple):
        got, wanted = case.used_slots(*got), case.used_slots(*wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(g, w)


def moved(compiled: Any) -> dict[str, int]:
    """The largest result in numbers of each kind of collective."""
    found: dict[str, int] = {}
    for shape, kind in re.findall(
        r"= \w+\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(",
        compiled.as_text(),
    ):
        found[kind] = max(found.get(kind, 0), int(np.prod([int(x) for x in shape.split(",") if x])))
    return found


@pytest.mark.parametrize("kv_heads", sweep(KV_HEADS, slow=[2, 1]))
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", sweep(CALLS, slow=set(CALLS) - QUICK))
def test_under_jit(kind: AxisType, kv_heads: int, name: str):
    """Nothing larger than a few counts per row of blocks travels; no query and no key."""
    if name == "a mask per KV head" and kv_heads < 4:
        pytest.skip("another test: masks that cannot be divided")
    profile, query, key = inputs(kv_heads)
    select = jax.jit(partial(hads.select, profile=profile, budget=0.5, layer=1, **CALLS[name]))
    wanted = on_one_device(kv_heads, name)
    sharded = on(mesh_of(kind, data=2, model=4), query, key)
    compiled = select.lower(*sharded).compile()
    got = compiled(*sharded)
    assert_same(got, wanted)
    assert tuple(got.kv_indices.sharding.spec)[:2] == ("data", "model")
    counts = 8 * (LENGTH // 16) * 4
    assert all(size <= counts for size in moved(compiled).values()), moved(compiled)
    assert query.size > 100 * counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_outside_jit(kind: AxisType):
    profile, query, key = inputs(4)
    select = partial(hads.select, profile=profile, budget=0.5, layer=1)
    assert_same(select(*on(mesh_of(kind, data=2, model=4), query, key)), select(query, key))


@pytest.mark.parametrize("kv_heads", sweep(KV_HEADS, slow=[2, 1]))
@pytest.mark.parametrize("name", sweep(CALLS, slow=set(CALLS) - QUICK))
def test_inside_the_callers_shard_map(kv_heads: int, name: str):
    if name == "a mask per KV head" and kv_heads < 4:
        pytest.skip("masks that cannot be divided are refused")
    profile, query, key = inputs(kv_heads)
    select = partial(hads.select, profile=profile, budget=0.5, layer=1, **CALLS[name])
    heads = "model" if kv_heads % 4 == 0 else None
    sharded = jax.shard_map(
        partial(select, heads_axis="model"),
        mesh=mesh_of(AUTO, data=2, model=4),
        in_specs=(P("data", None, "model", None), P("data", None, heads, None)),
        out_specs=P("data", "model"),
    )
    assert_same(jax.jit(sharded)(query, key), on_one_device(kv_heads, name))


@pytest.mark.slow
def test_heads_over_two_axes_and_a_traced_profile():
    profile, query, key = inputs(4)
    masks = hads.HadsMask.of(profile, 0.5, LENGTH)
    run = jax.jit(lambda masks, query, key: masks(1, query, key))
    wanted = run(masks, query, key)
    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of(kind, data=2, inner=2, outer=2)
        place = NamedSharding(mesh, P("data", None, ("inner", "outer"), None))
        everywhere = jax.device_put(masks, NamedSharding(mesh, P()))
        assert_same(run(everywhere, *jax.device_put((query, key), place)), wanted)
    inside = hads.HadsMask.of(profile, 0.5, LENGTH, heads_axis=("inner", "outer"))
    spec = P("data", None, ("inner", "outer"), None)
    sharded = jax.shard_map(
        partial(inside, 1), mesh=mesh_of(AUTO, data=2, inner=2, outer=2), in_specs=spec, out_specs=P("data", spec[2])
    )
    assert_same(jax.jit(sharded)(query, key), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(None, "model"), P(None, None, None, "model")], ids=["tokens", "features"])
def test_explicit_axes_of_tokens_and_features_are_gathered_with_a_warning(spec: P):
    profile, query, key = inputs(4)
    place = NamedSharding(mesh_of(EXPLICIT, data=2, model=4), spec)
    select = jax.jit(partial(hads.select, profile=profile, budget=0.5, layer=1))
    with pytest.warns(UserWarning, match="gathers query and key over the mesh axes model"):
        got = select(*jax.device_put((query, key), place))
    assert_same(got, select(query, key))


@pytest.mark.slow
def test_masks_that_cannot_be_divided():
    """One mask per KV head, and fewer KV heads than shards: gathered under jit, refused inside shard_map."""
    profile, query, key = inputs(2)
    select = partial(hads.select, profile=profile, budget=0.5, layer=1, per="kv_head")
    mesh = mesh_of(EXPLICIT, data=2, model=4)
    with pytest.warns(UserWarning, match="2 KV heads and 2 masks"):
        got = jax.jit(select)(*on(mesh, query, key))
    assert_same(got, jax.jit(select)(query, key))
    specs = P("data", None, "model", None), P("data", None, None, None)
    inside = jax.shard_map(partial(select, heads_axis="model"), mesh=mesh, in_specs=specs, out_specs=P("data", "model"))
    with pytest.raises(ValueError, match="has 4 shards, which cut KV heads or masks in parts"):
        inside(*on(mesh, query, key))


def test_wrong_heads_inside_shard_map():
    profile, query, key = inputs(4)
    mesh = mesh_of(EXPLICIT, data=2, model=4)
    inside = jax.shard_map(
        partial(hads.select, profile=profile, budget=0.5, layer=1),  # without heads_axis
        mesh=mesh,
        in_specs=P("data", None, "model", None),
        out_specs=P("data", "model"),
    )
    with pytest.raises(ValueError, match=r"is for .*=\(8, 4, 16\)"):
        inside(*on(mesh, query, key))


# -- kernels, interpreted --------------------------------------------------------------------------------------------

CUTS = {"all heads together": TOGETHER, "equal counts": Cut(4, "zigzag")}


@pytest.mark.parametrize("kv_heads", sweep([4, 2], slow=[4, 2]))
@pytest.mark.parametrize("room", sweep([None, 60], slow=[None, 60]))
@pytest.mark.parametrize("name", sweep(CUTS, slow=CUTS))
def test_kernels_are_partitioned(kv_heads: int, room: int | None, name: str):
    """As on several GPUs: the kernels' mask on one device, and nothing but counts travels."""
    profile, query, key = inputs(kv_heads)
    grid = CausalGrid(LENGTH, 16)
    given = jax.tree.map(jnp.asarray, Given(query, key, *profile.weights(1), {"count": jnp.int32(500)}))
    q, k = on(mesh_of(AUTO, data=2, model=4), query, key)
    split = given._replace(query=q, key=k)
    with interpret():
        wanted = jax.jit(partial(program._by_kernels, grid, 8, room, cut=CUTS[name]))(given)
        run = jax.jit(lambda x: partitioned(program._by_kernels, program._by_xla, grid, 8, room, x, CUTS[name]))
        compiled = run.lower(split).compile()
        got = compiled(split)
    assert set(moved(compiled)) <= {"all-gather", "all-reduce"} and max(moved(compiled).values()) <= 60 * 4
    assert_same_blocks(got, wanted)
    assert jax.tree.leaves(got)[0].sharding.spec == P("data", "model")


@pytest.mark.slow
def test_the_kernel_of_lists_is_partitioned():
    active = jnp.asarray(np.random.default_rng(0).random((2, 4, 24, 24)) < 0.3)
    full = np.tri(24, k=-1, dtype=bool)
    split = jax.device_put(active, NamedSharding(mesh_of(AUTO, data=2, model=4), P("data", "model")))
    with interpret():
        wanted = jax.jit(partial(compact._kernel, full, 300))(active)
        run = jax.jit(compact._partitioned_kernel(full, 300))
        compiled = run.lower(split).compile()
        got = compiled(split)
    assert not moved(compiled)
    assert_same_blocks(got, wanted)


def test_kernels_of_arrays_on_no_mesh_run_under_set_mesh():
    profile, query, key = inputs(4)
    grid = CausalGrid(LENGTH, 16)
    given = jax.tree.map(jnp.asarray, Given(query, key, *profile.weights(1), {"count": jnp.int32(500)}))
    active, full = jnp.asarray(np.random.default_rng(0).random((2, 4, 24, 24)) < 0.3), np.tri(24, k=-1, dtype=bool)
    # What each device runs is tested above: XLA's programs compile faster than interpreted kernels.
    choice = partial(partitioned, program._by_xla, program._by_xla, grid, 8, 60)
    with interpret():
        wanted = jax.jit(partial(program._by_xla, grid, 8, 60))(given), compact._kernel(full, 300, active)
        with jax.set_mesh(mesh_of(AUTO, data=2, model=4)):
            got = jax.jit(lambda x: choice(x, TOGETHER))(given)
            lists = jax.jit(lambda active: compact._partitioned_kernel(full, 300)(active))(active)
    for found, expected in zip((got, lists), wanted, strict=True):
        assert_same_blocks(found, expected)


@pytest.mark.slow
def test_partitioned_kernels_under_vmap_take_xlas_program():
    profile, query, key = inputs(4)
    grid = CausalGrid(LENGTH, 16)
    given = jax.tree.map(jnp.asarray, Given(query, key, *profile.weights(1), {"count": jnp.int32(500)}))
    wanted = program._by_xla(grid, 8, None, given)
    axes = jax.tree.map(lambda _: None, given)._replace(query=0, key=0)

    def run(given: Given) -> jax.Array:
        return partitioned(program._by_kernels, program._by_xla, grid, 8, None, given, TOGETHER)

    got = jax.vmap(run, in_axes=(axes,))(given._replace(query=query[:, None], key=key[:, None]))
    assert np.array_equal(got[:, 0], wanted)
