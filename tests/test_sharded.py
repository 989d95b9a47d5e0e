"""`xsake.sharded_attention` on 8 simulated devices: the numbers of one device, and what the compiled programs move."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sweep import sweep
from targets import XLA

import xsake
from xsake._op import registry
from xsake._sequence import sharded as sequence_sharded
from xsake.testing.case import check, collect, make, with_grads

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")

SIZES = dict(q_len=96, block_q=16, block_kv=16)  # on three shards: every hop of a ring is compiled
TOKENS = np.arange(96, dtype=np.int32)
CASES = {
    "causal": dict(mask_causal=True),
    "all arguments": dict(
        mask_causal=True, bias=(1, 0, 0, 0), sinks=(4,), local_window_size=(70, 0), logits_soft_cap=20.0
    ),
    "a mask a batch and head": dict(mask=(2, 4), is_causal=True, bias=(0, 1, 1, 0)),
    "a sink and a window": dict(mask=(1, 1), density=1.0, mask_causal=True, mask_window=(40, None)),
    "segments": dict(segment_ids=np.stack([TOKENS // 50, np.where(TOKENS < 80, TOKENS // 33, -1)])),
    "positions": dict(is_causal=True, positions=np.stack([TOKENS // 2, TOKENS[::-1] * 3 % 64])),
    "lengths": dict(query_seq_lengths=np.array([96, 60], np.int32), key_value_seq_lengths=np.array([80, 77], np.int32)),
    "no mask": dict(mask=None, is_causal=True),
    "bfloat16": dict(mask_causal=True, dtype="bfloat16", sinks=(4, 2)),
}
QUICK = {  # the other pairs reach no other code
    "gather contiguous": (),  # two processes gather, in test_sharded_processes
    "gather zigzag": (),
    "ring contiguous": (),
    "ring zigzag": ("all arguments",),
    "sparse contiguous": ("a sink and a window",),
    "sparse zigzag": (),
}


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def laid(order, shards, axes, x):
    for axis in axes if order == "zigzag" else ():
        x = xsake.zigzag(x, shards, axis=axis) if x.shape[axis] > 1 else x
    return x


def sharded(case, mesh, exchange, order, mask="own", **options):
    """(output, lse) of the inputs, in the order of the sequence."""
    shards = mesh.shape["seq"]
    rest = {
        name: jax.tree.map(partial(laid, order, shards, (1,)), x) if name in ("segment_ids", "positions") else x
        for name, x in case.rest.items()
    }

    def run(inputs):
        axes = dict(query=(1,), key=(1,), value=(1,), bias=(2, 3), sinks=())
        inputs = {name: laid(order, shards, axes[name], x) for name, x in inputs.items()}
        results = xsake.sharded_attention(
            **inputs,
            mask=case.mask() if isinstance(mask, str) else mask,
            **rest,
            **case.options,
            mesh=mesh,
            batch="data" if "data" in mesh.axis_names else None,
            heads="model" if "model" in mesh.axis_names else None,
            sequence="seq",
            exchange=exchange,
            order=order,
            return_lse=True,
            **options,
        )
        back = xsake.unzigzag if order == "zigzag" else lambda x, _: x
        return tuple(back(x, shards) for x in results)

    return run


def check_sharded(case, mesh, exchange, order, **options):
    run = sharded(case, mesh, exchange, order, **options)
    check(case, collect(case, *jax.jit(lambda i, c: with_grads(run, i, c))(case.inputs, case.cotangents)))


ALL = [f"{pair}, {name}" for pair in QUICK for name in CASES]


@pytest.mark.parametrize(
    "which", sweep(ALL, slow=[w for w in ALL if w.split(", ", 1)[1] not in QUICK[w.split(", ")[0]]])
)
def test_the_numbers_of_one_device(which):
    pair, name = which.split(", ", 1)
    case = make(XLA, **(SIZES | CASES[name]))
    check_sharded(case, mesh_of(data=2, seq=3), *pair.split())


@pytest.mark.parametrize("exchange", sweep(["gather", "ring"], slow=["ring"]))
@pytest.mark.slow  # some cases above have such lengths
def test_lengths_that_are_not_whole_blocks(exchange):
    ids = tuple(np.broadcast_to(np.arange(n, dtype=np.int32) // 50, (2, n)) for n in (107, 150))
    case = make(XLA, q_len=107, kv_len=150, mask_causal=False, sinks=(4,), segment_ids=ids)
    check_sharded(case, mesh_of(data=2, seq=4), exchange, "contiguous")


@pytest.mark.parametrize("exchange", sweep(["gather", "ring"], slow=["ring"]))
@pytest.mark.slow  # test_partition has explicit axes
def test_explicit_axes_with_heads_cut_too(exchange):
    case = make(XLA, **SIZES, mask_causal=True, mask=(1, 2))
    check_sharded(case, mesh_of(AxisType.Explicit, data=2, model=2, seq=2), exchange, "contiguous")


def test_the_ring_adds_a_bias_where_heads_without_one_would_be_packed():
    case = make(XLA, q_len=64, block_q=16, block_kv=16, mask=(1, 1), bias=(0, 0, 1, 0))
    check_sharded(case, mesh_of(seq=2), "ring", "contiguous")


def test_explicit_axes_and_a_length_that_is_padded_outside_jit():
    options = dict(mesh=mesh_of(AxisType.Explicit, seq=2), sequence="seq", is_causal=True)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 80, 2, 8))
    out = xsake.sharded_attention(q, k, v, **options)
    assert out.sharding.spec == P(None, "seq", None, None)
    np.testing.assert_allclose(out, xsake.attention(q, k, v, is_causal=True), atol=1e-6)


def test_explicit_axes_and_a_length_that_is_not_cut_into_equal_parts():
    case = make(XLA, q_len=79, mask=None, is_causal=True)
    run = sharded(case, mesh_of(AxisType.Explicit, seq=2), "gather", "contiguous")
    results, grads = jax.jit(lambda i, c: with_grads(run, i, c))(case.inputs, case.cotangents)
    assert results[0].sharding.spec == P(None, None, None, None)
    check(case, collect(case, results, grads))


@pytest.mark.parametrize("exchange", sweep(["gather", "ring"], slow=["ring"]))
@pytest.mark.slow  # the cases above run the same program, in a shard_map of our own
def test_inside_the_callers_shard_map(exchange):
    case = make(XLA, **SIZES | dict(q_len=128), mask_causal=True)
    mesh, rows = mesh_of(seq=8), case.mask().shard_rows(8)
    spec = P(None, "seq")

    def run(inputs):
        def part(inputs, rows):
            return xsake.sharded_attention(**inputs, mask=rows, sequence="seq", exchange=exchange, return_lse=True)

        return jax.shard_map(
            part, mesh=mesh, in_specs=(dict.fromkeys(inputs, spec), rows.partition_spec("seq")), out_specs=spec
        )(inputs, rows)

    check(case, collect(case, *jax.jit(lambda i, c: with_grads(run, i, c))(case.inputs, case.cotangents)))


# -- what moves --------------------------------------------------------------------------------------------------------

B, T, H, K, D, N = 1, 256, 4, 4, 16, 4


def compiled_text(exchange, gradient=False):
    mask = xsake.BlockMask.full(T, T, block_q=16, block_kv=16, is_causal=True)
    mesh = mesh_of(seq=N)

    def run(q, k, v):
        return xsake.sharded_attention(q, k, v, mask, mesh=mesh, sequence="seq", exchange=exchange)

    place = jax.sharding.NamedSharding(mesh, P(None, "seq"))
    q = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32, sharding=place)
    k = jax.ShapeDtypeStruct((B, T, K, D), jnp.float32, sharding=place)
    f = jax.grad(lambda *a: run(*a).sum(), (0, 1, 2)) if gradient else run
    return jax.jit(f).lower(q, k, k).compile().as_text()


def sizes_of(text, operation):
    """Elements of the float results of an operation, one number per instruction."""
    found = []
    for shape in re.findall(rf"(?m)^.*? = (.*?)\s{operation}(?:-start)?\(", text):
        arrays = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", shape)]
        if arrays:
            found.append(int(sum(arrays)))
    return found


def test_the_ring_moves_each_shard_of_keys_and_values_once_and_begins_before_the_attention():
    text = compiled_text("ring")
    moved = sum(sizes_of(text, "collective-permute"))
    assert moved == (N - 1) * 2 * B * (T // N) * K * D  # (n-1)/n of all keys and values, on every device
    assert not sizes_of(text, "all-gather") and not sizes_of(text, "all-to-all")
    lines = dict(re.findall(r"(?m)^\s*(?:ROOT )?(%[\w.\-]+) = (.*)$", text))
    for name in [name for name, line in lines.items() if " collective-permute(" in line]:
        todo, seen = [name], set()
        while todo:
            line = lines.get(todo.pop(), "")
            assert not re.search(r"\s(dot|while|custom-call|call)\(", line), "a permute waits for an attention"
            more = set(re.findall(r"%[\w.\-]+", line.split(", metadata")[0])) - seen
            seen |= more
            todo += more


def test_gathering_moves_all_keys_and_values_once_and_holds_little_of_them():
    text = compiled_text("gather")
    assert not sizes_of(text, "collective-permute")
    pieces = sizes_of(text, "all-gather")
    # The loop over pieces of the heads has one gather of keys and one of values: 1 of 4 heads each.
    assert sorted(pieces) == [B * T * D] * 2
    assert f"[{T},{T}]" not in text and f"f32[{B},{T},{K},{D}]" not in text


def test_the_sparse_exchange_moves_what_is_listed_and_no_more():
    mask = xsake.patterns.sink_window(T, T, sink=16, window=32, block_q=16, block_kv=16)
    mesh = mesh_of(seq=N)
    assert mask.shard_rows(N).most_to_send(K) == 3  # the second shard needs the sink and the window of the first
    place = jax.sharding.NamedSharding(mesh, P(None, "seq"))
    q = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32, sharding=place)

    def run(q, k, v):
        return xsake.sharded_attention(q, k, v, mask, mesh=mesh, sequence="seq", exchange="sparse")

    text = jax.jit(run).lower(q, q, q).compile().as_text()
    assert not sizes_of(text, "all-gather") and not sizes_of(text, "collective-permute")
    assert sum(sizes_of(text, "all-to-all")) == 2 * B * N * 3 * 16 * D  # keys and values of one head, in a loop


@pytest.mark.slow  # it simulates an operation that CPUs lack
def test_elsewhere_than_on_cpus_only_what_is_there_travels(monkeypatch):
    """By the documented meaning of `ragged_all_to_all`, which XLA has for GPUs and TPUs alone."""
    chosen = jax.lax.platform_dependent

    def not_cpu(*args, default, **platforms):
        return default(*args) if "cpu" in platforms else chosen(*args, default=default, **platforms)

    def ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        given = operand, input_offsets, send_sizes, output_offsets, recv_sizes
        data, start, size, to, expected = (jax.lax.all_gather(x, axis_name) for x in given)
        own, place = jax.lax.axis_index(axis_name), jnp.arange(len(output))
        for sender in range(len(data)):
            which = place - to[sender, own]
            here = (which >= 0) & (which < jnp.minimum(size[sender, own], expected[own, sender]))
            found = data[sender][jnp.clip(start[sender, own] + which, 0, len(operand) - 1)]
            output = jnp.where(here.reshape(-1, *(1,) * (output.ndim - 1)), found, output)
        return output

    monkeypatch.setattr(jax.lax, "platform_dependent", not_cpu)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    case = make(XLA, **(SIZES | CASES["a sink and a window"]))
    check_sharded(case, mesh_of(data=2, seq=3), "sparse", "contiguous")


@pytest.mark.slow  # the cases above have gradients
def test_gradients_come_back_scattered():
    text = compiled_text("gather", gradient=True)
    assert f"[{T},{T}]" not in text and f"f32[{B},{T},{K},{D}]" not in text
    scattered = sizes_of(text, "reduce-scatter")
    assert not scattered or max(scattered) <= B * (T // N) * D * 2  # on the CPU XLA may sum whole pieces instead


# -- rows of a mask ----------------------------------------------------------------------------------------------------


def test_zigzag_gives_every_shard_as_much_to_do():
    causal = xsake.BlockMask.full(8192, 8192, block_q=64, block_kv=64, is_causal=True)
    window = xsake.patterns.sink_window(8192, 8192, sink=128, window=1024, block_q=64, block_kv=64)
    for mask in (causal, window):
        walked = np.asarray(mask.shard_rows(8, order="zigzag").blocks_walked())
        assert walked.max() / walked.mean() <= 1.10


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_rows_are_cut_alike_under_jit(order):
    case = make(XLA, q_len=200, kv_len=130, mask=(2, 3))
    mask = case.mask()
    concrete = mask.shard_rows(4, order=order)
    traced = jax.jit(lambda m: m.shard_rows(4, order=order))(mask)
    np.testing.assert_array_equal(traced.kv_row_ptr, concrete.kv_row_ptr)
    used = np.arange(concrete.capacity) < np.asarray(concrete.kv_row_ptr)[..., -1:]
    np.testing.assert_array_equal(
        np.asarray(traced.kv_indices)[..., : concrete.capacity][used], np.asarray(concrete.kv_indices)[used]
    )
    rows = concrete.order.blocks(concrete.rows * 4)
    blocks = np.pad(mask.to_blocks(), [(0, 0)] * 2 + [(0, rows.max() + 1 - mask.num_q_blocks), (0, 0)])
    np.testing.assert_array_equal(np.diff(np.asarray(concrete.kv_row_ptr))[1], blocks[:, :, rows[1]].sum(-1))


@pytest.mark.slow  # test_padding has such lists
def test_lists_that_do_not_fit_give_nan():
    q = jnp.ones((1, 64, 2, 16))
    mesh = mesh_of(seq=4)

    def run(q, blocks, **exchange):
        options = dict(block_q=8, block_kv=8, q_len=64, kv_len=64)
        blocks = jnp.repeat(jnp.repeat(blocks, 2, 0), 2, 1)
        mask = xsake.BlockMask.from_blocks(blocks, capacity=None if exchange else 20, **options)
        return xsake.sharded_attention(q, q, q, mask, mesh=mesh, sequence="seq", **exchange)

    sparse = partial(run, exchange="sparse", capacity=1)
    dense = jnp.ones((4, 4), bool)
    for f in (run, sparse):
        assert np.isnan(jax.jit(f)(q, dense)).all()
        assert np.isfinite(jax.jit(f)(q, jnp.eye(4, dtype=bool))).all()


def test_zigzag_and_back():
    x = jnp.arange(32).reshape(1, 32)
    assert xsake.zigzag(x, 2)[0, :24].tolist() == [*range(8), *range(24, 32), *range(8, 16)]
    np.testing.assert_array_equal(xsake.unzigzag(xsake.zigzag(x, 4), 4), x)
    place = jax.NamedSharding(
        jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Explicit,)), P(None, "seq")
    )
    laid = xsake.zigzag(jax.device_put(x, place), 4)
    assert laid.sharding == place
    np.testing.assert_array_equal(laid, xsake.zigzag(x, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(exchange="ringg"), "exchange='ringg' must be 'auto', 'gather', 'ring' or 'sparse'"),
        (dict(capacity=3), "capacity=3 is of exchange='sparse', not of 'gather'"),
        (dict(order="zig"), "order='zig' must be one of 'contiguous', 'zigzag'"),
        (dict(sequence="model"), "must be different axes of the mesh, which has 'data', 'seq'"),
        (dict(heads="seq"), "must be different axes"),
        (dict(batch="data", query=3), "query has batch 3, which batch='data' cannot cut into 2 equal parts"),
        (dict(order="zigzag", length=100), "pad them to 128 and 128, with key_value_seq_lengths"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calls(options, message):
    options = dict(sequence="seq", length=64, query=2) | options
    q = jnp.ones((options.pop("query"), options.pop("length"), 2, 16))
    with pytest.raises(ValueError, match=re.escape(message)):
        xsake.sharded_attention(q, q, q, mesh=mesh_of(data=2, seq=4), **options)


def ones(*lead):
    sizes = dict(block_q=16, block_kv=16, q_len=64, kv_len=64)
    return xsake.BlockMask.from_blocks(np.ones((*lead, 4, 4), bool), **sizes)


FITS_A_PART = {  # one device's part of the arguments fits its part of the arrays, and the whole does not fit the whole
    "one length": dict(key_value_seq_lengths=np.array([3])),
    "a length for two sequences": dict(query_seq_lengths=np.array([3, 4])),
    "bias of half the batch": dict(bias=np.zeros((2, 1, 64, 64), np.float32)),
    "bias of a quarter of the heads": dict(bias=np.zeros((1, 2, 64, 64), np.float32)),
    "segments of half the batch": dict(segment_ids=np.zeros((2, 64), np.int32)),
    "positions of half the batch": dict(positions=np.zeros((2, 64), np.int32)),
    "a mask of half the batch": dict(mask=ones(2, 1)),
    "a mask of half the K/V heads": dict(mask=ones(1, 2)),
    "sinks of a quarter of the heads": dict(sinks=np.zeros(2, np.float32)),
}


@pytest.mark.parametrize("name", FITS_A_PART)
@pytest.mark.usefixtures("unchecked_annotations")
def test_the_whole_arrays_are_checked(name):
    """By the words of `attention`, also for rows that are cut already."""
    given, q, k = FITS_A_PART[name], jnp.ones((4, 64, 8, 8)), jnp.ones((4, 64, 4, 8))
    with pytest.raises(ValueError) as expected:
        xsake.attention(q, k, k, **given)
    axes = dict(batch="data", sequence="seq", heads="model", mesh=mesh_of(data=2, seq=2, model=2))
    for each in (given, given | {"mask": given["mask"].shard_rows(2)} if "mask" in given else given):
        with pytest.raises(ValueError, match=re.escape(str(expected.value))):
            xsake.sharded_attention(q, k, k, **each, **axes)


def test_rows_of_other_lengths():
    with pytest.raises(
        ValueError, match="mask is for 64 queries x 64 keys, but query has q_len=60 and key has kv_len=60"
    ):
        xsake.sharded_attention(
            *[jnp.ones((1, 60, 1, 8))] * 3, ones().shard_rows(2), mesh=mesh_of(seq=2), sequence="seq"
        )


@pytest.mark.usefixtures("unchecked_annotations")
def test_the_part_of_a_shard_map_is_checked():
    q, rows = jnp.ones((2, 64, 4, 8)), ones(2, 1).shard_rows(2)

    def part(q, rows, bias):
        return xsake.sharded_attention(q[:1], q[:1], q[:1], rows, bias=bias, sequence="seq")

    mesh, spec = mesh_of(seq=2), P(None, "seq")
    for bias, message in (
        (1, "mask has batch 2; it must be 1 or the query's batch=1"),
        (3, "=[1, 4, 32, 64]; got shape"),
    ):
        run = jax.shard_map(part, mesh=mesh, in_specs=(spec, rows.partition_spec("seq"), P()), out_specs=spec)
        with pytest.raises(ValueError, match=re.escape(message)):
            run(q, rows, jnp.zeros((1, bias, 1, 1)))


PLATFORMS = {"cuda": ("mosaic_gpu", "gpu", "mosaic_gpu"), "tpu": ("mosaic_tpu", "tpu", "tpu_custom_call")}


@pytest.mark.parametrize(
    ("exchange", "platform", "length"),
    [
        ("ring", "tpu", 1024),
        ("gather", "cuda", 16384),  # so long that dQ, dK and dV come from one kernel
        *(pytest.param(x, "cuda", 1024, marks=pytest.mark.slow) for x in ("gather", "ring", "sparse")),
        *(pytest.param(x, "cuda", 16384, marks=pytest.mark.slow) for x in ("ring", "sparse")),
    ],
)
def test_lowers_for_other_platforms(exchange, platform, length, monkeypatch):
    name, devices, kernel = PLATFORMS[platform]
    monkeypatch.setattr(registry.get(name), "unavailable", lambda: None)
    monkeypatch.setattr(sequence_sharded, "platform_of", lambda query: devices)
    mask = xsake.BlockMask.full(length, length, block_q=128, block_kv=128, is_causal=True)
    q = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    options = dict(mesh=mesh_of(seq=2), sequence="seq", exchange=exchange, implementation=name)

    def loss(q):
        return xsake.sharded_attention(q, q, q, mask, **options).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=(platform,)).as_text()
    moved = {"ring": "collective_permute", "gather": "all_gather", "sparse": "ragged_all_to_all"}[exchange]
    assert kernel in text and moved in text
    assert ("block_sparse_backward" in text) == (length == 16384)
