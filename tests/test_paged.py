"""`page_table`: keys and values in pages give what they give in one piece, and wrong pages are errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sweep import sweep

import xsake
from xsake.kernels_xla_ref import oracle

B, T, S, H, K, D, PAGE, COUNT = 2, 5, 96, 4, 2, 8, 16, 20
LENGTHS = np.array([90, 41], np.int32)


@pytest.fixture(scope="module")
def arrays():
    """(query, key, value, key pages, value pages, table): pages in random order, those past the lengths full of NaN."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((B, t, h, D)).astype(np.float32) for t, h in ((T, H), (S, K), (S, K)))
    table = rng.permutation(COUNT)[: B * S // PAGE].reshape(B, -1).astype(np.int32)
    pages = []
    for x in (key, value):
        made = np.full((COUNT, PAGE, K, D), np.nan, np.float32)
        for b, length in enumerate(LENGTHS):
            for i, page in enumerate(table[b]):
                end = min((i + 1) * PAGE, length)
                made[page, : max(end - i * PAGE, 0)] = x[b, i * PAGE : max(end, i * PAGE)]
        pages.append(made)
    return tuple(map(jnp.asarray, (query, key, value, *pages, table)))


def in_one_piece(arrays, mask=None, **options):
    """Dense, by the oracle: it compiles in a fraction of the time of a block-sparse program."""
    return jax.jit(lambda *qkv: oracle.attention(*qkv, mask, key_value_seq_lengths=LENGTHS, **options))(*arrays[:3])


def positions():
    return LENGTHS[:, None] - T + np.arange(T), np.broadcast_to(np.arange(S), (B, S))


CASES = {
    "dense": {},
    "causal by position, a window": dict(is_causal=True, local_window_size=(30, 0), positions=positions()),
    "a mask of larger blocks than pages": dict(block=32),
    "a mask of smaller blocks": dict(block=8, is_causal=True, local_window_size=(30, 0), positions=positions()),
    "blocks that pages do not divide": dict(block=24, sinks=jnp.ones(H), logits_soft_cap=5.0),
}


@pytest.mark.parametrize(
    "name", sweep(list(CASES), slow=[name for name in CASES if name != "blocks that pages do not divide"])
)
def test_pages_are_attended_as_one_piece(arrays, name):
    options = dict(CASES[name])
    mask = None
    if block := options.pop("block", None):
        active = np.random.default_rng(1).random((H, 1, -(-S // block))) < 0.6
        mask = xsake.BlockMask.from_blocks(active, block_q=8, block_kv=block, q_len=T, kv_len=S, transpose=False)
    options |= dict(return_lse=True)
    expected = in_one_piece(arrays, mask, **options)
    found = jax.jit(lambda table: attend(arrays, table, mask=mask, key_value_seq_lengths=LENGTHS, **options))(
        arrays[-1]
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def attend(arrays, table, **options):
    query, _, _, key_pages, value_pages, _ = arrays
    return xsake.attention(query, key_pages, value_pages, page_table=table, **options)


def test_a_wrong_page_is_an_error_or_nan(arrays):
    table = np.asarray(arrays[-1]).copy()
    table[1, 5] = -1  # past the length of sequence 1: never read
    good = attend(arrays, table, key_value_seq_lengths=LENGTHS)
    assert jnp.isfinite(good).all()
    table[1, 2] = COUNT
    with pytest.raises(ValueError, match=r"page_table\[1, 2\]=20 must be a page from 0 to 19"):
        attend(arrays, table, key_value_seq_lengths=LENGTHS)
    traced = jax.jit(lambda table: attend(arrays, table, key_value_seq_lengths=LENGTHS))(table)
    assert jnp.isnan(traced[1]).all()
    np.testing.assert_allclose(traced[0], good[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(table=np.zeros((3, 6), np.int32)),
            ValueError,
            r"page_table must be \[batch, pages per sequence\] with batch=2",
        ),
        (dict(table=np.zeros((2, 6), np.float32)), TypeError, "page_table must be integers, got dtype float32"),
        (
            dict(implementation="triton"),
            NotImplementedError,
            "implementation='triton' is not available here: it needs a GPU",
        ),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calls_are_refused(arrays, change, error, message):
    table = change.pop("table", arrays[-1])
    with pytest.raises(error, match=message):
        attend(arrays, table, **change)


def test_a_tile_lies_within_a_page(arrays):
    from xsake.kernels_xla_ref import Config, Tiling

    wide = Tiling(q=10, kv=32, chunk=4)  # 5 queries of 2 heads
    with pytest.raises(ValueError, match="a tile of 32 keys must divide the page of 16 keys"):
        attend(arrays, arrays[-1], config=Config(forward=wide, backward=wide))


@pytest.mark.parametrize("of", ["query", "key", "value", "bias", "sinks"])
def test_there_is_no_derivative(arrays, of):
    query, _, _, key, value, table = arrays
    given = dict(query=query, key=key, value=value, bias=jnp.zeros((1, 1, 1, 1)), sinks=jnp.zeros(query.shape[2]))

    def loss(x):
        return xsake.attention(**(given | {of: x}), page_table=table).sum()

    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="attention with page_table is forward only"):
            derivative(given[of])


def test_kernels_refuse_pages_that_they_cannot_read_in_place(arrays, any_jax):
    query, _, _, *pages, table = (x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in arrays)
    wide = [jnp.pad(x, ((0, 0),) * 3 + ((0, 64 - D),)) for x in (query, *pages)]
    short = query, *(jnp.tile(x, (1, 4, 1, 1)) for x in pages)
    odd = [jnp.pad(x, ((0, 0), (0, 0 if i == 0 else 1), (0, 0), (0, 0))) for i, x in enumerate(wide)]
    for name, given, message in (
        ("mosaic_gpu", short, r"head_dim=8 must be one of .* with page_table"),
        ("mosaic_gpu", wide, "page_table: the pages of 16 keys must be a multiple of 64"),
        ("triton", odd, "page_table: the pages of 17 keys must be a multiple of 16"),
        ("mosaic_tpu", wide, "head_dim=64 must be a multiple of 128 with page_table"),
    ):
        with xsake.interpret(), pytest.raises(NotImplementedError, match=message):
            xsake.attention(*given, page_table=table, implementation=name)


@pytest.mark.parametrize("own_pages", sweep([True, False], slow=[False]))
def test_vmap_folds_tables_and_pages_into_the_batch(arrays, own_pages):
    query, _, _, key_pages, value_pages, table = arrays
    options = dict(key_value_seq_lengths=LENGTHS)

    def attend(query, key, value, table):
        return xsake.attention(query, key, value, page_table=table, **options)

    expected = in_one_piece(arrays)
    if own_pages:
        turned = jnp.stack([key_pages, key_pages[::-1]]), jnp.stack([value_pages, value_pages[::-1]])
        tables = jnp.stack([table, COUNT - 1 - table])
        found = jax.jit(jax.vmap(attend, in_axes=(None, 0, 0, 0)))(query, *turned, tables)
    else:
        queries = jnp.stack([query] * 2)
        found = jax.jit(jax.vmap(attend, in_axes=(0, None, None, None)))(queries, key_pages, value_pages, table)
    for one in found:
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # test_partition has the same cut without pages
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_devices_take_their_sequences_and_heads(arrays, axis_type):
    query, _, _, *pages, table = arrays
    expected = xsake.attention(query, *pages, page_table=table, key_value_seq_lengths=LENGTHS)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
            for x, spec in zip(
                (query, *pages, table, LENGTHS),
                (("data", None, "model"), (None, None, "model"), (None, None, "model"), ("data",), ("data",)),
                strict=True,
            )
        ]
        found = jax.jit(lambda q, k, v, t, n: xsake.attention(q, k, v, page_table=t, key_value_seq_lengths=n))(*placed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
