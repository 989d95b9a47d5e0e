"""Every invariant of the BlockMask contract, on masks that Hypothesis draws."""

from __future__ import annotations

import dataclasses
import itertools
import json
import zipfile

import chex
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.reference import rule
from hypothesis import given, settings
from jax.sharding import PartitionSpec

import xsake
from xsake import BlockMask
from xsake.hads import density_bucket

LISTS = ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order", "q_indices", "q_row_ptr", "q_num_full", "col_order")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Boolean blocks [b, h, nQ, nK] and the mask's sizes and rule."""

    blocks: np.ndarray
    sizes: dict

    def __repr__(self) -> str:
        return f"Drawn({self.blocks.astype(int).tolist()}, {self.sizes})"

    def build(self, **options) -> BlockMask:
        return BlockMask.from_blocks(self.blocks, **self.sizes, **options)

    @property
    def elements_of_rule(self) -> np.ndarray:
        q, k = np.arange(self.sizes["q_len"])[:, None], np.arange(self.sizes["kv_len"])[None]
        return rule(q - k, self.sizes["is_causal"], self.sizes["local_window_size"])

    def _per_block(self, reduce, elements, fill) -> np.ndarray:
        """[nQ, nK] over a grid padded with `fill`."""
        n, m = self.blocks.shape[-2:]
        bq, bk = self.sizes["block_q"], self.sizes["block_kv"]
        grid = np.full((n * bq, m * bk), fill)
        grid[: elements.shape[0], : elements.shape[1]] = elements
        return reduce(reduce(grid.reshape(n, bq, m, bk), 3), 1)

    @property
    def allowed(self) -> np.ndarray:
        return self._per_block(np.any, self.elements_of_rule, False)

    @property
    def full(self) -> np.ndarray:
        """Every element passes, and padding never does."""
        return self._per_block(np.all, self.elements_of_rule, False)

    @property
    def active(self) -> np.ndarray:
        return self.blocks & self.allowed


fewer = settings(max_examples=settings().max_examples // 3)  # for tests that compile each example


windows = st.one_of(
    st.none(),
    st.integers(0, 30),
    st.tuples(st.one_of(st.none(), st.integers(0, 30)), st.one_of(st.none(), st.integers(0, 30))),
)


@st.composite
def drawn(draw, *, rules: bool = True, batch: int = 2) -> Drawn:
    sizes = dict(
        block_q=draw(st.integers(1, 9)),
        block_kv=draw(st.integers(1, 9)),
        q_len=draw(st.integers(1, 40)),
        kv_len=draw(st.integers(1, 40)),
        is_causal=draw(st.booleans()) if rules else False,
        local_window_size=draw(windows) if rules else None,
    )
    n, m = -(-sizes["q_len"] // sizes["block_q"]), -(-sizes["kv_len"] // sizes["block_kv"])
    shape = (draw(st.integers(1, batch)), draw(st.integers(1, 3)), n, m)
    return Drawn(draw(hnp.arrays(bool, shape, elements=st.booleans(), fill=st.booleans())), sizes)


def arrays(mask: BlockMask) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(mask, name)) for name in LISTS}


def rows_of(indices, ptr) -> list[list[int]]:
    return [indices[a:b].tolist() for a, b in itertools.pairwise(ptr)]


# -- lists -------------------------------------------------------------------------------------------------------------


@given(drawn())
def test_round_trip(d):
    np.testing.assert_array_equal(d.build().to_blocks(), d.active)


@given(drawn())
def test_rows_list_full_blocks_ascending_then_partial_ascending(d):
    mask, full = arrays(d.build()), d.full
    for b, h in np.ndindex(d.blocks.shape[:2]):
        rows = rows_of(mask["kv_indices"][b, h], mask["kv_row_ptr"][b, h])
        for i, row in enumerate(rows):
            active = d.active[b, h, i]
            assert row == [*np.flatnonzero(active & full[i]), *np.flatnonzero(active & ~full[i])]
            assert mask["kv_num_full"][b, h, i] == (active & full[i]).sum()


@given(drawn())
def test_transpose_is_exact(d):
    mask, full = arrays(d.build()), d.full
    assert mask["q_indices"].shape == mask["kv_indices"].shape
    for b, h in np.ndindex(d.blocks.shape[:2]):
        for j, column in enumerate(rows_of(mask["q_indices"][b, h], mask["q_row_ptr"][b, h])):
            active = d.active[b, h, :, j]
            assert column == [*np.flatnonzero(active & full[:, j]), *np.flatnonzero(active & ~full[:, j])]
            assert mask["q_num_full"][b, h, j] == (active & full[:, j]).sum()


@given(drawn(), st.integers(0, 5))
def test_padding_slots_repeat_the_last_entry(d, spare):
    need = int(d.active.sum((-2, -1)).max())
    mask = arrays(d.build(capacity=max(1, need + spare)))
    for indices, ptr in (("kv_indices", "kv_row_ptr"), ("q_indices", "q_row_ptr")):
        for b, h in np.ndindex(d.blocks.shape[:2]):
            used = mask[ptr][b, h, -1]
            assert used == d.active[b, h].sum()
            padding = mask[indices][b, h, used:]
            assert (padding == (mask[indices][b, h, used - 1] if used else 0)).all()


@given(drawn())
def test_full_means_every_element_tail_padding_included(d):
    mask = d.build()
    lists = arrays(mask)
    elements = d._per_block(np.all, d.elements_of_rule, False)
    for b, h in np.ndindex(d.blocks.shape[:2]):
        for i, row in enumerate(rows_of(lists["kv_indices"][b, h], lists["kv_row_ptr"][b, h])):
            n = lists["kv_num_full"][b, h, i]
            assert all(elements[i, j] for j in row[:n]) and not any(elements[i, j] for j in row[n:])


def test_tail_blocks_are_never_full():
    mask = BlockMask.full(100, 70, block_q=32, block_kv=32)
    assert np.asarray(mask.kv_num_full).tolist() == [[[2, 2, 2, 0]]]
    assert np.asarray(mask.q_num_full).tolist() == [[[3, 3, 0]]]


@given(drawn())
def test_orders_are_longest_first(d):
    mask = arrays(d.build())
    for order, ptr in (("row_order", "kv_row_ptr"), ("col_order", "q_row_ptr")):
        lengths = np.diff(mask[ptr], axis=-1)
        assert (np.sort(mask[order], -1) == np.arange(lengths.shape[-1])).all()
        assert (np.diff(np.take_along_axis(lengths, mask[order].astype(int), -1), axis=-1) <= 0).all()


@given(drawn())
def test_shapes_and_types(d):
    mask = d.build()
    b, h, n, m = d.blocks.shape
    c = mask.capacity
    shapes = dict(zip(LISTS, [(c,), (n + 1,), (n,), (n,), (c,), (m + 1,), (m,), (m,)], strict=True))
    for name, shape in shapes.items():
        chex.assert_shape(getattr(mask, name), (b, h, *shape))
        assert getattr(mask, name).dtype == np.int32
        assert isinstance(getattr(mask, name), jax.Array)
    assert (mask.batch, mask.heads, mask.num_q_blocks, mask.num_kv_blocks) == (b, h, n, m)


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_blocks_of_two_three_and_four_dimensions(ndim):
    blocks = np.random.default_rng(0).random((2, 3, 4, 4)) < 0.5
    given_, expected = {2: (blocks[0, 0], blocks[:1, :1]), 3: (blocks[0], blocks[:1]), 4: (blocks, blocks)}[ndim]
    mask = BlockMask.from_blocks(given_, block_q=8, block_kv=8, q_len=32, kv_len=32)
    np.testing.assert_array_equal(mask.to_blocks(), expected)


@given(drawn())
def test_without_a_transpose(d):
    mask, whole = d.build(transpose=False), d.build()
    assert mask.q_indices is mask.q_row_ptr is mask.q_num_full is mask.col_order is None
    assert not mask.has_transpose and whole.has_transpose
    np.testing.assert_array_equal(mask.kv_indices, whole.kv_indices)
    np.testing.assert_array_equal(mask.to_blocks(), d.active)


# -- capacity ----------------------------------------------------------------------------------------------------------


@given(drawn())
def test_capacity_is_the_need_rounded_up_to_a_power_of_two(d):
    """(Or all blocks that the rule allows, if that is less: more can never be needed.)"""
    need, capacity = int(d.active.sum((-2, -1)).max()), d.build().capacity
    power = 1
    while power < need:
        power *= 2
    assert need <= capacity <= power
    assert capacity in (power, max(int(d.allowed.sum()), 1))


@given(drawn())
def test_capacity_too_small_raises(d):
    need = int(d.active.sum((-2, -1)).max())
    d.build(capacity=max(need, 1))
    if need > 1:
        with pytest.raises(ValueError, match=rf"capacity={need - 1}.*{need} active blocks.*capacity>={need}"):
            d.build(capacity=need - 1)


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="capacity=0"):
        BlockMask.from_blocks(np.zeros((2, 2), bool), block_q=8, block_kv=8, q_len=16, kv_len=16, capacity=0)


@fewer
@given(drawn(), st.booleans())
def test_traced_equals_eager(d, given_capacity):
    eager = d.build()
    capacity = eager.capacity if given_capacity else None
    traced = jax.jit(lambda blocks: BlockMask.from_blocks(blocks, **d.sizes, capacity=capacity))(d.blocks)
    if not given_capacity:
        assert traced.capacity == max(int(d.allowed.sum()), 1)
        eager = d.build(capacity=traced.capacity)
    for name in LISTS:
        np.testing.assert_array_equal(getattr(traced, name), getattr(eager, name), err_msg=name)
    np.testing.assert_array_equal(traced.to_blocks(), d.active)


def test_traced_views_equal_eager_ones():
    d = Drawn(
        np.random.default_rng(1).random((2, 3, 5, 7)) < 0.4,
        dict(block_q=7, block_kv=5, q_len=33, kv_len=34, is_causal=True, local_window_size=(19, None)),
    )
    mask = d.build()
    blocks, elements, density, per_head = jax.jit(
        lambda m: (m.to_blocks(), m.to_elements(), m.density(), m.density(per_head=True))
    )(mask)
    np.testing.assert_array_equal(blocks, mask.to_blocks())
    np.testing.assert_array_equal(elements, mask.to_elements())
    np.testing.assert_allclose(density, mask.density(), rtol=1e-6)
    np.testing.assert_allclose(per_head, mask.density(per_head=True), rtol=1e-6)


def test_traced_overflow_is_known():
    blocks = np.zeros((1, 2, 4, 4), bool)
    blocks[0, 1] = True
    sizes = dict(block_q=8, block_kv=8, q_len=32, kv_len=32)
    mask = jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, capacity=8))(blocks)
    assert np.asarray(mask.overflowed()).tolist() == [[False, True]]
    assert mask.capacity == 8


# -- other constructors ------------------------------------------------------------------------------------------------


@fewer
@given(drawn(), st.randoms(use_true_random=False))
def test_from_indices(d, random):
    """Any order, -1 anywhere, repeats count once; traced or not."""
    b, h, n, m = d.blocks.shape
    width = 2 * m + 1
    indices = np.full((b, h, n, width), -1, np.int32)
    for at in np.ndindex(b, h, n):
        row = list(np.flatnonzero(d.blocks[at]))
        row += [random.choice(row) for _ in range(random.randint(0, width - len(row)))] if row else []
        row += [-1] * (width - len(row))
        random.shuffle(row)
        indices[at] = row
    mask = BlockMask.from_indices(indices, **d.sizes)
    expected = d.build()
    traced = jax.jit(lambda x: BlockMask.from_indices(x, **d.sizes, capacity=expected.capacity))(indices)
    for name in LISTS:
        np.testing.assert_array_equal(getattr(mask, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(getattr(traced, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("wrong", [-2, 4, 100])
def test_from_indices_out_of_range(wrong):
    sizes = dict(block_q=8, block_kv=8, q_len=16, kv_len=32)
    with pytest.raises(ValueError, match=rf"kv_indices must be -1 .* in \[0, 4\).*{wrong}"):
        BlockMask.from_indices([[0, 1], [2, wrong]], **sizes)


@given(drawn())
def test_full_is_all_that_the_rule_allows(d):
    mask = BlockMask.full(**d.sizes)
    np.testing.assert_array_equal(mask.to_blocks()[0, 0], d.allowed)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], d.elements_of_rule)
    assert (mask.batch, mask.heads) == (1, 1)
    if d.allowed.any():
        assert float(mask.density()) == 1.0


# -- views -------------------------------------------------------------------------------------------------------------


@given(drawn())
def test_to_elements(d):
    elements = d.build().to_elements()
    assert elements.shape == (*d.blocks.shape[:2], d.sizes["q_len"], d.sizes["kv_len"])
    rows = np.arange(d.sizes["q_len"]) // d.sizes["block_q"]
    columns = np.arange(d.sizes["kv_len"]) // d.sizes["block_kv"]
    np.testing.assert_array_equal(elements, d.blocks[:, :, rows][:, :, :, columns] & d.elements_of_rule)


@given(drawn())
def test_density(d):
    mask = d.build()
    per_head = d.active.sum((-2, -1)) / max(d.allowed.sum(), 1)
    np.testing.assert_allclose(mask.density(per_head=True), per_head, rtol=1e-6)
    np.testing.assert_allclose(mask.density(), per_head.mean(), rtol=1e-6)


@given(st.data())
def test_union_and_intersection(data):
    a = data.draw(drawn())
    shape = [data.draw(st.sampled_from([1, n])) for n in a.blocks.shape[:2]] + list(a.blocks.shape[2:])
    b = Drawn(data.draw(hnp.arrays(bool, shape)), a.sizes)
    one, other = a.build(), b.build()
    np.testing.assert_array_equal(one.union(other).to_blocks(), a.active | b.active)
    np.testing.assert_array_equal(other.intersection(one).to_blocks(), a.active & b.active)
    np.testing.assert_array_equal((one | other).to_blocks(), a.active | b.active)
    np.testing.assert_array_equal((one & other).to_blocks(), a.active & b.active)
    assert (one & other).local_window_size == one.local_window_size


@pytest.mark.parametrize("change", [dict(block_q=8), dict(is_causal=True), dict(local_window_size=5), dict(q_len=63)])
def test_union_of_masks_that_do_not_fit_together(change):
    sizes = dict(q_len=64, kv_len=64, block_q=16, block_kv=16)
    with pytest.raises(ValueError, match="same blocks, lengths and rule"):
        BlockMask.full(**sizes).union(BlockMask.full(**(sizes | change)))


def test_union_of_an_inference_mask_has_no_transpose():
    a = BlockMask.full(32, 32, block_q=16, block_kv=16)
    b = BlockMask.full(32, 32, block_q=16, block_kv=16, transpose=False)
    assert not (a | b).has_transpose and (a & a).has_transpose


def test_union_under_jit():
    rng = np.random.default_rng(2)
    sizes = dict(block_q=8, block_kv=8, q_len=30, kv_len=30)
    x, y = rng.random((2, 3, 4, 4)) < 0.5
    a, b = (BlockMask.from_blocks(z, **sizes, capacity=16) for z in (x, y))
    union = jax.jit(lambda a, b: a.union(b, capacity=16))(a, b)
    np.testing.assert_array_equal(union.to_blocks()[0], x | y)


def test_picture():
    mask = BlockMask.from_blocks(
        np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]], bool),
        block_q=8,
        block_kv=8,
        q_len=20,
        kv_len=20,
    )
    text = str(mask)
    first, *rest = text.splitlines()
    assert "20 x 20" in first and "8 x 8" in first
    assert rest[0].split() == ["head", "0", "55.6%", "head", "1", "33.3%"]
    assert [line.split() for line in rest[1:]] == [["█··", "█··"], ["██·", "·█·"], ["·██", "··█"]]
    assert "█" not in repr(mask) and "20 x 20" in repr(mask)


@given(drawn())
def test_every_mask_has_a_picture(d):
    text = str(d.build())
    assert len(text.splitlines()) > 1
    assert ("█" in text) == bool(d.active.any())


def test_pictures_of_large_masks_and_of_trees_without_contents():
    mask = xsake.patterns.random(8192, 8192, density=0.3, seed=0, heads=20, block_q=16, block_kv=16)
    text = str(mask)
    assert len(text.splitlines()) < 120 and max(map(len, text.splitlines())) <= 120 and "more" in text
    assert "BlockMask(" in str(mask.partition_spec("b", "h"))
    seen = []
    jax.jit(lambda m: seen.append(str(m)) or m.kv_indices)(mask)
    assert "BlockMask(" in seen[0]


@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_partition_spec(batch, heads):
    mask = BlockMask.from_blocks(np.ones((batch, heads, 2, 2), bool), block_q=8, block_kv=8, q_len=16, kv_len=16)
    specs = mask.partition_spec("data", "model")
    assert jax.tree.structure(specs) == jax.tree.structure(mask)
    expected = PartitionSpec("data" if batch > 1 else None, "model" if heads > 1 else None, None)
    assert all(
        tuple(spec) == tuple(expected)
        for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    )
    nothing = jax.tree.leaves(mask.partition_spec(), is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert all(all(axis is None for axis in spec) for spec in nothing)


# -- files -------------------------------------------------------------------------------------------------------------


@given(drawn(), st.booleans())
def test_save_and_load(tmp_path_factory, d, transpose):
    path = tmp_path_factory.mktemp("mask") / "mask.npz"
    mask = d.build(transpose=transpose)
    mask.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["mask.npz"]
    again = BlockMask.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(mask), "the static fields are part of the structure"
    jax.tree.map(np.testing.assert_array_equal, again, mask)


def _saved(tmp_path):
    path = tmp_path / "mask.npz"
    xsake.patterns.sliding_window(64, 64, window=(20, 3), block_q=16, block_kv=16).save(path)
    return path


def test_file_has_no_pickle(tmp_path):
    with np.load(_saved(tmp_path), allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
    with zipfile.ZipFile(tmp_path / "mask.npz") as archive:
        assert all(name.endswith(".npy") for name in archive.namelist())


def _rewrite_header(path, **changes):
    with np.load(path) as file:
        content = {name: file[name] for name in file.files}
    header = json.loads(str(content["header"])) | changes
    np.savez(path, **(content | {"header": np.array(json.dumps(header))}))


@pytest.mark.parametrize("changes", [{"version": 999}, {"version": None}, {"format": "something else"}])
def test_unknown_versions_are_refused(tmp_path, changes):
    path = _saved(tmp_path)
    _rewrite_header(path, **changes)
    with pytest.raises(ValueError, match=r"mask\.npz has format .* version .*this xsake reads"):
        BlockMask.load(path)


@pytest.mark.parametrize("keep", [0, 1, 30, 300, -1, -30])
def test_truncated_files_are_refused(tmp_path, keep):
    path = _saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_damaged_contents_are_refused(tmp_path):
    path = _saved(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.find(b"kv_indices.npy") + 60
    data[at : at + 20] = bytes(20)
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_files_of_other_things_are_refused(tmp_path):
    for name, write in {
        "text.npz": lambda p: p.write_text("not a mask"),
        "arrays.npz": lambda p: np.savez(p, a=np.zeros(3)),
        "single.npy": lambda p: np.save(p, np.zeros(3)),
        "header.npz": lambda p: np.savez(p, header=np.array("not json")),
        "pickle.npz": lambda p: np.savez(p, header=np.array({"a": 1}, dtype=object)),
    }.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            BlockMask.load(tmp_path / name)


def test_files_with_missing_arrays_are_refused(tmp_path):
    path = _saved(tmp_path)
    with np.load(path) as file:
        content = {name: file[name] for name in file.files if name != "kv_row_ptr"}
    np.savez(path, **content)
    with pytest.raises(ValueError, match=r"mask\.npz"):
        BlockMask.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "none.npz")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = _saved(tmp_path)
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        BlockMask.full(32, 32, block_q=16, block_kv=16).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["mask.npz"]
    assert path.read_bytes() == before


def test_a_traced_mask_cannot_be_saved(tmp_path):
    mask = BlockMask.full(32, 32, block_q=16, block_kv=16)
    with pytest.raises(TypeError, match="traced BlockMask cannot be saved"):
        jax.jit(lambda m: m.save(tmp_path / "mask.npz"))(mask)
    assert list(tmp_path.iterdir()) == []


# -- tree --------------------------------------------------------------------------------------------------------------


@given(drawn())
def test_is_a_pytree_of_its_lists(d):
    mask = d.build()
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == len(LISTS) and all(leaf.dtype == jnp.int32 for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, BlockMask) and again.block_q == mask.block_q and again.density_hint == mask.density_hint
    hash(structure)


def test_new_contents_do_not_retrace():
    sizes = dict(block_q=8, block_kv=8, q_len=60, kv_len=60, is_causal=True)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def active(mask):
        return mask.kv_row_ptr[..., -1]

    chex.clear_trace_counter()
    rng = np.random.default_rng(0)
    for _ in range(4):
        blocks = rng.random((3, 8, 8)) < 0.5
        mask = BlockMask.from_blocks(blocks, **sizes, capacity=36, density_hint=0.5)
        assert np.asarray(active(mask)).tolist() == [(blocks & np.tri(8, dtype=bool)).sum((1, 2)).tolist()]


def test_slightly_different_contents_have_one_structure():
    """Built without a capacity: the power of two and the density bucket absorb small changes."""
    a, b = (xsake.patterns.random(512, 512, density=x, seed=0, block_q=32, block_kv=32) for x in (0.36, 0.34))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [x.shape for x in jax.tree.leaves(a)] == [x.shape for x in jax.tree.leaves(b)]


def test_is_frozen():
    mask = BlockMask.full(32, 32, block_q=16, block_kv=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.block_q = 8


def test_density_hint_is_a_log_bucket():
    hints = [
        BlockMask.from_blocks(
            np.arange(1024).reshape(32, 32) < n, block_q=8, block_kv=8, q_len=256, kv_len=256
        ).density_hint
        for n in range(0, 1025, 8)
    ]
    assert hints[-1] == 1.0 and all(0 < a <= b <= 1 for a, b in itertools.pairwise(hints))
    distinct = sorted(set(hints))
    assert len(distinct) < 25
    ratios = np.array(distinct[1:]) / np.array(distinct[:-1])
    assert (ratios > 1.3).all(), "buckets are a constant factor apart"


@given(st.floats(1e-9, 1))
def test_density_bucket_is_near(density):
    bucket = density_bucket(density)
    assert bucket == density_bucket(bucket), "a bucket is in itself"
    if density >= 2**-10:
        assert 2**-0.26 <= bucket / density <= 2**0.26


def test_density_hint_can_be_given_and_is_unknown_under_jit():
    sizes = dict(block_q=8, block_kv=8, q_len=16, kv_len=16)
    assert BlockMask.from_blocks(np.ones((2, 2), bool), **sizes, density_hint=0.25).density_hint == 0.25
    assert jax.jit(lambda x: BlockMask.from_blocks(x, **sizes))(np.ones((2, 2), bool)).density_hint is None
    assert (
        jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, density_hint=0.5))(np.ones((2, 2), bool)).density_hint
        == 0.5
    )


def test_only_masks_that_may_not_fit_are_checked_in_the_call():
    sizes = dict(block_q=64, block_kv=64, q_len=128, kv_len=128)
    ones = np.ones((2, 2), bool)
    assert BlockMask.from_blocks(ones, **sizes).complete
    assert BlockMask.from_blocks(ones, **sizes, capacity=4).complete
    assert jax.jit(lambda x: BlockMask.from_blocks(x, **sizes))(ones).complete  # room for all
    assert not jax.jit(lambda x: BlockMask.from_blocks(x, **sizes, capacity=3))(ones).complete
    indices = np.array([[0, 1], [0, 9]])
    assert not jax.jit(lambda x: BlockMask.from_indices(x, **sizes))(indices).complete  # one is out of range
