"""`jax.shard_map` over batch, heads and the sequence of queries, with its default checks, on simulated devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sweep import sweep

import xsake
from xsake.testing.case import attend, check, collect, make, with_grads

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices, real or simulated")

MASKS = {
    "a mask a batch and head": (2, 8),
    "a mask a kv head": (1, 4),
    "a mask a batch": (2, 1),
    "one mask for all": (1, 1),
}


@pytest.fixture(autouse=True)
def _not_in_the_triton_interpreter(request):
    implementation = request.node.callspec.params.get("implementation") if hasattr(request.node, "callspec") else None
    if implementation is not None and implementation.interpret and implementation.name == "triton":
        pytest.skip("JAX's interpreter of Triton kernels does not know values that vary over a mesh; hardware does")


def _mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def _case(implementation, mask, **options):
    options = (
        dict(q_len=39, kv_len=70, q_heads=8, kv_heads=4, bias=(1, 0, 0, 0), sinks=(8,), mask_causal=True, density=0.7)
        | options
    )
    return make(implementation, mask=mask, **options)


HEADS = P("data", None, "model", None)
SPECS = dict(query=HEADS, key=HEADS, value=HEADS, bias=P(None, "model", None, None), sinks=P("model"))
RESULTS = (HEADS, P("data", None, "model"))


@pytest.mark.parametrize("name", sweep(MASKS, slow=["a mask a kv head", "a mask a batch", "one mask for all"]))
@pytest.mark.slow  # the next tests have gradients in a shard_map
def test_gradients_through_shard_map(implementation, name):
    """Differentiated outside. Bias and sinks are shared over the batch: their gradients are sums over devices."""
    case = _case(implementation, MASKS[name])
    mask = case.mask()

    def sharded(inputs):
        return jax.shard_map(
            lambda x, m: attend(implementation, x, m, {}),
            mesh=_mesh(data=2, model=4),
            in_specs=(SPECS, mask.partition_spec("data", "model")),
            out_specs=RESULTS,
        )(inputs, mask)

    with implementation.context():
        check(case, collect(case, *jax.jit(lambda i, c: with_grads(sharded, i, c))(case.inputs, case.cotangents)))


@pytest.mark.slow  # the next test differentiates inside, too
@pytest.mark.parametrize("name", ["a mask a batch and head", "one mask for all"])
def test_gradients_inside_shard_map(implementation, name):
    """Differentiated inside: gradients of replicated inputs are replicated, summed over the devices."""
    case = _case(implementation, MASKS[name])
    mask = case.mask()

    def inside(inputs, mask, cotangents):
        return with_grads(lambda x: attend(implementation, x, mask, {}), inputs, cotangents)

    f = jax.shard_map(
        inside,
        mesh=_mesh(data=2, model=4),
        in_specs=(SPECS, mask.partition_spec("data", "model"), RESULTS),
        out_specs=(RESULTS, SPECS),
    )
    with implementation.context():
        check(case, collect(case, *jax.jit(f)(case.inputs, mask, case.cotangents)))


@pytest.mark.slow  # test_partition cuts the batch
def test_batch_only_with_everything_else_replicated(implementation):
    """Sinks, a bias for all, lengths and a replicated mask."""
    lengths = np.array([70, 3, 41, 0, 12, 66, 70, 35], np.int32) * implementation.unit
    case = _case(
        implementation,
        (1, 2),
        batch=8,
        q_heads=2,
        kv_heads=1,
        bias=(1, 1, 1, 0),
        sinks=(2, 2),
        key_value_seq_lengths=lengths,
    )
    data = P("data")
    specs = dict(query=data, key=data, value=data, bias=P(), sinks=P())

    def inside(inputs, mask, lengths, cotangents):
        return with_grads(
            lambda x: attend(implementation, x, mask, {"key_value_seq_lengths": lengths}), inputs, cotangents
        )

    f = jax.shard_map(
        inside, mesh=_mesh(data=8), in_specs=(specs, P(), data, (data, data)), out_specs=((data, data), specs)
    )
    with implementation.context():
        check(case, collect(case, *jax.jit(f)(case.inputs, case.mask(), jnp.asarray(lengths), case.cotangents)))


@pytest.mark.slow  # gradients of what is replicated are sums over devices in the test before it, too
def test_heads_only_with_keys_replicated(implementation):
    """Multi-query attention: query heads are sharded, the KV head is not; its gradient is a sum over devices."""
    case = _case(implementation, (1, 8), kv_heads=1, bias=None)
    heads, whole = P(None, None, "model"), P()
    specs = dict(query=heads, key=whole, value=whole, sinks=P("model"))

    def sharded(inputs, mask):
        return jax.shard_map(
            lambda x, m: attend(implementation, x, m, {}),
            mesh=_mesh(model=8),
            in_specs=(specs, case.mask().partition_spec(None, "model")),
            out_specs=(heads, heads),
        )(inputs, mask)

    mask = case.mask()
    with implementation.context():
        check(
            case,
            collect(
                case, *jax.jit(lambda i, c: with_grads(lambda x: sharded(x, mask), i, c))(case.inputs, case.cotangents)
            ),
        )


def test_predecessor_sequence_parallelism_offsets_reach_the_mask(implementation):
    """Queries sharded over their sequence: positions say where a shard lies, and it builds its rows of the mask."""
    n = implementation.size(128)
    positions = np.broadcast_to(np.arange(n, dtype=np.int32), (1, n))
    case = make(
        implementation,
        batch=1,
        q_len=128,
        q_heads=2,
        kv_heads=1,
        mask=(1, 2),
        block_q=16,
        block_kv=16,
        density=0.7,
        is_causal=True,
        local_window_size=(implementation.size(77), None),
        positions=(positions, positions),
    )
    rows = P(None, "sequence")
    specs = dict(query=rows, key=P(), value=P())

    def inside(inputs, blocks, q_positions, cotangents):
        mask = xsake.BlockMask.from_blocks(
            blocks, block_q=case.block_q, block_kv=case.block_kv, q_len=inputs["query"].shape[1], kv_len=n
        )
        rest = {"positions": (q_positions, jnp.asarray(positions))}
        return with_grads(lambda x: attend(implementation, x, mask, rest, **case.options), inputs, cotangents)

    f = jax.shard_map(
        inside,
        mesh=_mesh(sequence=8),
        in_specs=(specs, P(None, None, "sequence"), rows, (rows, rows)),
        out_specs=((rows, rows), specs),
    )
    with implementation.context():
        check(case, collect(case, *jax.jit(f)(case.inputs, jnp.asarray(case.blocks), positions, case.cotangents)))
