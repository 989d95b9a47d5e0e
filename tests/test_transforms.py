"""`xsake.attention` under jit, grad, vmap, checkpoint and scan, against float64, example by example."""

from __future__ import annotations

import dataclasses
import functools

import chex
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sweep import sweep

import xsake
from xsake.testing import reference
from xsake.testing.case import Case, attend, check, collect, make, run, with_grads
from xsake.testing.compare import assert_close_to_float64

N = 3
MASK = dict(capacity=12, density_hint=0.5)  # one structure for all contents


def cases(implementation, count=N, **options) -> list[Case]:
    options = (
        dict(q_len=39, kv_len=70, q_heads=2, kv_heads=1, mask=(1, 2), block_q=16, block_kv=16, density=0.4) | options
    )
    drawn = [make(implementation, seed=100 + i, **options) for i in range(count)]
    return [c.replace(blocks=_at_most(c.blocks, MASK["capacity"])) for c in drawn]


def _at_most(blocks, count):
    """The first `count` blocks of each head."""
    return blocks & (np.cumsum(blocks.reshape(*blocks.shape[:2], -1), -1).reshape(blocks.shape) <= count)


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def take(tree, index):
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


SOME = {"query", "key", "value", "bias", "sinks", "mask"}


@pytest.mark.parametrize(
    "mapped",
    sweep(
        [SOME, {"query"}, {"key", "value"}, {"mask"}, {"bias"}, {"sinks"}],
        slow=[SOME, {"query"}, {"key", "value"}, {"bias"}, {"sinks"}],
    ),
    ids=lambda m: "all" if m == SOME else "-".join(sorted(m)),
)
def test_vmap_of_grad(implementation, mapped):
    """Gradients of each example, for operands that are mapped and that are not."""
    all_cases = cases(implementation, bias=(1, 0, 0, 0), sinks=(2,), mask_causal="mask" in mapped)
    first = all_cases[0]
    inputs = {k: stack([c.inputs[k] for c in all_cases]) if k in mapped else v for k, v in first.inputs.items()}
    mask = stack([c.mask(**MASK) for c in all_cases]) if "mask" in mapped else first.mask(**MASK)
    cotangents = stack([c.cotangents for c in all_cases])

    def one(inputs, mask, cotangents):
        return with_grads(lambda x: attend(implementation, x, mask, {}), inputs, cotangents)

    axes = ({k: 0 if k in mapped else None for k in inputs}, 0 if "mask" in mapped else None, 0)
    with implementation.context():
        results, grads = jax.jit(jax.vmap(one, in_axes=axes))(inputs, mask, cotangents)
    for i, case in enumerate(all_cases):
        effective = first.replace(
            **{k: getattr(case, k) for k in ("query", "key", "value") if k in mapped},
            arguments={k: (case if k in mapped else first).arguments[k] for k in ("bias", "sinks")},
            blocks=(case if "mask" in mapped else first).blocks,
            d_out=case.d_out,
            d_lse=case.d_lse,
        )
        check(effective, collect(effective, take(results, i), take(grads, i)))


def test_grad_of_vmap_sums_over_what_is_shared(implementation):
    """The query is mapped along another axis; key, value, bias and sinks are shared: their gradients are sums."""
    all_cases = cases(implementation, bias=(1, 1, 0, 0), sinks=(2, 2))
    shared = all_cases[0]
    effective = [shared.replace(query=c.query, d_out=c.d_out, d_lse=c.d_lse, blocks=c.blocks) for c in all_cases]
    mask = stack([c.mask(**MASK) for c in effective])
    inputs = shared.inputs | {"query": jnp.stack([jnp.asarray(c.query) for c in effective], 1)}

    def every(inputs):
        return jax.vmap(
            lambda q, mask: attend(implementation, inputs | {"query": q}, mask, {}), in_axes=(1, 0), out_axes=1
        )(inputs["query"], mask)

    cotangents = jax.tree.map(lambda *xs: jnp.stack(xs, 1), *[c.cotangents for c in effective])
    with implementation.context():
        results, grads = jax.jit(lambda i, c: with_grads(every, i, c))(inputs, cotangents)

    truth = [reference.evaluate(c, np.float64) for c in effective]
    noise = [reference.noise(c, e.results) for c, e in zip(effective, truth, strict=True)]
    exact, plain = _together(truth), _together([reference.evaluate(c, c.query.dtype) for c in effective])
    usual = reference.yardstick(exact, plain)
    for name in (f"d_{name}" for name in grads):
        e, p = getattr(exact.results, name), getattr(usual, name)
        assert_close_to_float64(name, grads[name[2:]], e, p, sum(getattr(x, name) for x in noise))
    for i, case in enumerate(effective):
        out, lse = (np.asarray(x)[:, i] for x in results)
        check(case, collect(case, (out, lse), {}))


def _together(examples: list[reference.Evaluation]) -> reference.Evaluation:
    """Gradients of all examples, which have queries of their own and share all else."""
    fields = reference.Results._fields
    every = {name: [getattr(x.results, name).astype(np.float64) for x in examples] for name in fields}
    results = {name: np.stack(xs, 1) if name in ("out", "lse", "d_query") else sum(xs) for name, xs in every.items()}
    rows = {name: np.concatenate([x.by_row[name] for x in examples]) for name in examples[0].by_row}
    return reference.Evaluation(reference.Results(**results), rows)


@pytest.mark.slow  # test_vmap_of_grad and test_vmap_over_tokens_and_batches have a level each
def test_nested_vmap(implementation):
    """Outer over queries and masks, inner over keys and values, with lengths unmapped."""
    lengths = np.array([30, 39], np.int32) * implementation.unit
    outer = cases(implementation, 2, batch=2, key_value_seq_lengths=lengths)
    inner = cases(implementation, 3, batch=2)
    mask = stack([c.mask(**MASK) for c in outer])
    q, k, v = stack([c.query for c in outer]), stack([c.key for c in inner]), stack([c.value for c in inner])

    def one(q, mask, k, v, cotangents):
        rest = {"key_value_seq_lengths": jnp.asarray(lengths)}
        return with_grads(
            lambda x: attend(implementation, x, mask, rest), {"query": q, "key": k, "value": v}, cotangents
        )

    f = jax.vmap(jax.vmap(one, in_axes=(None, None, 0, 0, None)), in_axes=(0, 0, None, None, None))
    with implementation.context():
        results, grads = jax.jit(f)(q, mask, k, v, outer[0].cotangents)
    for i, j in np.ndindex(2, 3):
        case = outer[i].replace(key=inner[j].key, value=inner[j].value, d_out=outer[0].d_out, d_lse=outer[0].d_lse)
        check(case, collect(case, take(results, (i, j)), take(grads, (i, j))))


def test_vmap_over_tokens_and_batches(implementation):
    """Batch of more than one, with a mask and a bias for each entry, segment ids and positions mapped."""
    rng = np.random.default_rng(0)
    n, m = implementation.size(39), implementation.size(70)

    def tokens():
        ids = rng.integers(-1, 2, (2, n)).astype(np.int32), rng.integers(-1, 2, (2, m)).astype(np.int32)
        return dict(
            segment_ids=ids,
            positions=tuple(rng.permuted(np.tile(np.arange(x), (2, 1)), axis=1).astype(np.int32) for x in (n, m)),
        )

    all_cases = [
        c.replace(arguments=c.arguments | tokens())
        for c in cases(implementation, batch=2, mask=(2, 2), bias=(0, 1, 0, 0), is_causal=True)
    ]

    def one(inputs, mask, rest, cotangents):
        return with_grads(lambda x: attend(implementation, x, mask, rest, is_causal=True), inputs, cotangents)

    given_ = stack([(c.inputs, c.mask(**MASK), c.rest, c.cotangents) for c in all_cases])
    with implementation.context():
        results, grads = jax.jit(jax.vmap(one))(*given_)
    for i, case in enumerate(all_cases):
        check(case, collect(case, take(results, i), take(grads, i)))


@pytest.mark.slow  # test_debug_infs_and_nans_without_jit compares values and gradients, too
def test_without_jit(implementation, caplog):
    """Eager, without lse: value and gradients by jax.grad; the next call compiles nothing."""
    case = cases(implementation, 1)[0].replace(d_lse=np.zeros_like(cases(implementation, 1)[0].d_lse))
    mask = case.mask()

    def loss(inputs):
        out = xsake.attention(**inputs, mask=mask, implementation=implementation.name)
        return (out * case.d_out).sum(), out

    with implementation.context():
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(case.inputs)
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            jax.value_and_grad(loss, has_aux=True)(case.inputs)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert not compiled, "the second call compiles again"
    check(case, collect(case, (out, run(implementation, case).lse), grads))


@pytest.mark.slow  # test_scan_over_examples has checkpoints
@pytest.mark.usefixtures("interpreter_without_effects")
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_checkpoint(implementation, policy):
    case = cases(implementation, 1, sinks=(2,))[0]
    policy = policy and getattr(jax.checkpoint_policies, policy)

    def attention(inputs, mask):
        return attend(implementation, inputs, mask, {})

    def everything(inputs, mask, cotangents):
        return with_grads(lambda x: jax.checkpoint(attention, policy=policy)(x, mask), inputs, cotangents)

    with implementation.context():
        check(case, collect(case, *jax.jit(everything)(case.inputs, case.mask(), case.cotangents)))


@pytest.mark.usefixtures("interpreter_without_effects")
@pytest.mark.parametrize("remat", sweep([False, True], slow=[False]))
def test_scan_over_examples(implementation, remat):
    """Contents of the mask change from step to step; gradients go through the scan, and through its checkpoints."""
    all_cases = cases(implementation, sinks=(2,))
    masks = stack([c.mask(**MASK) for c in all_cases])

    def step(carry, x):
        return carry, attend(implementation, x[0], x[1], {})

    def every(inputs):
        return jax.lax.scan(jax.checkpoint(step) if remat else step, 0, (inputs, masks))[1]

    with implementation.context():
        results, grads = jax.jit(lambda i, c: with_grads(every, i, c))(
            stack([c.inputs for c in all_cases]), stack([c.cotangents for c in all_cases])
        )
    for i, case in enumerate(all_cases):
        check(case, collect(case, take(results, i), take(grads, i)))


@pytest.mark.slow  # the test before it has checkpoints in a scan
@pytest.mark.usefixtures("interpreter_without_effects")
def test_checkpointed_scan_over_layers(implementation):
    """The usual stack of layers: the output of a layer is the query of the next."""
    case = cases(implementation, 1, head_dim=16, value_dim=16)[0]
    mask = case.mask()

    def layers(inputs, wrap):
        def layer(x, _):
            return x + attend(implementation, inputs | {"query": x}, mask, {})[0], None

        return jax.lax.scan(wrap(layer), inputs["query"], None, length=3)[0].sum()

    with implementation.context():
        plain = jax.jit(jax.grad(lambda i: layers(i, lambda f: f)))(case.inputs)
        saved = jax.jit(jax.grad(lambda i: layers(i, jax.checkpoint)))(case.inputs)
    for name in plain:
        assert np.isfinite(np.asarray(plain[name])).all()
        np.testing.assert_allclose(np.asarray(saved[name]), np.asarray(plain[name]), rtol=1e-5, atol=1e-5)


def test_gradient_of_lse_alone_and_of_one_input(implementation):
    case = cases(implementation, 1)[0]
    case, mask = case.replace(d_out=np.zeros_like(case.d_out)), case.mask()

    def loss(key):
        results = attend(implementation, case.inputs | {"key": key}, mask, {})
        return (results[1] * case.d_lse).sum(), results

    with implementation.context():
        d_key, results = jax.jit(jax.grad(loss, has_aux=True))(case.inputs["key"])
    check(case, collect(case, results, {"key": d_key}))


@pytest.mark.parametrize("capacity", sweep([None, 12], slow=[None]))
def test_mask_built_inside_jit(implementation, capacity):
    case = cases(implementation, 1, mask_causal=True)[0]

    @functools.partial(jax.jit, static_argnames="capacity")
    def everything(inputs, blocks, cotangents, capacity):
        mask = xsake.BlockMask.from_blocks(blocks, **case.sizes, is_causal=True, capacity=capacity)
        return with_grads(lambda x: attend(implementation, x, mask, {}), inputs, cotangents)

    with implementation.context():
        check(case, collect(case, *everything(case.inputs, case.blocks, case.cotangents, capacity)))


def test_new_mask_contents_do_not_retrace(implementation):
    all_cases = cases(implementation, 4)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def forward(inputs, mask):
        return attend(implementation, inputs, mask, {})

    chex.clear_trace_counter()
    with implementation.context():
        for case in all_cases:
            same = all_cases[0].replace(blocks=case.blocks)
            check(same, collect(same, forward(same.inputs, same.mask(**MASK)), {}))


def test_inference_mask_serves_forward_and_refuses_gradients(implementation):
    case = cases(implementation, 1)[0]
    mask = case.mask(transpose=False)
    with implementation.context():
        check(case, collect(case, attend(implementation, case.inputs, mask, {}), {}))
        with pytest.raises(ValueError, match=r"transpose=False.*transpose=True"):
            jax.grad(lambda x: attend(implementation, x, mask, {})[0].sum())(case.inputs)


def test_orders_may_be_left_out(implementation):
    case = cases(implementation, 1)[0]
    mask = dataclasses.replace(case.mask(), row_order=None, col_order=None)
    check(case, run(implementation, case, mask=mask))


# -- drawn -------------------------------------------------------------------------------------------------------------

T, S, BLOCK = 53, 75, 16
ANY_IDS = (-7, 5, np.iinfo(np.int32).max)


@given(data=st.data())
def test_any_mask_lengths_segments_and_positions(implementation, data):
    """One compiled function: only contents change."""
    t, s, block = (implementation.size(x) for x in (T, S, BLOCK))
    n, m = -(-t // block), -(-s // block)
    blocks = data.draw(hnp.arrays(bool, (2, 4, n, m), elements=st.booleans(), fill=st.booleans()), "blocks")

    def ints(name, shape, low, high, *others):
        elements = st.integers(low, high) | st.sampled_from(others) if others else st.integers(low, high)
        return data.draw(hnp.arrays(np.int32, shape, elements=elements, fill=elements), name)

    arguments = dict(
        query_seq_lengths=ints("query_seq_lengths", (2,), 0, t),
        key_value_seq_lengths=ints("key_value_seq_lengths", (2,), 0, s),
        segment_ids=(ints("query ids", (2, t), -2, 2, *ANY_IDS), ints("key ids", (2, s), -2, 2, *ANY_IDS)),
        positions=(ints("query positions", (2, t), 0, s), ints("key positions", (2, s), 0, s)),
    )
    if implementation.partial:  # what it refuses would look like a failure, which Hypothesis makes smaller for minutes
        del arguments["positions"]
    case = make(
        implementation,
        q_len=T,
        kv_len=S,
        block_q=BLOCK,
        block_kv=BLOCK,
        mask=None,
        sinks=(4,),
        is_causal=True,
        local_window_size=(implementation.size(40), None),
        seed=data.draw(st.integers(0, 5)),
        **arguments,
    ).replace(blocks=blocks)
    check(case, run(implementation, case, mask=case.mask(capacity=n * m, density_hint=0.5)))


@given(data=st.data())
def test_any_mask(implementation, data):
    """A call with a mask and nothing else, in which full blocks need no test."""
    t, s, block = (implementation.size(x) for x in (T, S, BLOCK))
    n, m = -(-t // block), -(-s // block)
    blocks = data.draw(hnp.arrays(bool, (1, 4, n, m), elements=st.booleans(), fill=st.booleans()))
    case = make(
        implementation,
        q_len=T,
        kv_len=S,
        block_q=BLOCK,
        block_kv=BLOCK,
        mask_causal=True,
        seed=data.draw(st.integers(0, 5)),
    )
    case = case.replace(blocks=blocks)
    check(case, run(implementation, case, mask=case.mask(capacity=n * m, density_hint=0.5)))
