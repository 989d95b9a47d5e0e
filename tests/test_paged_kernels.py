"""`page_table` on the kernels: what a cache in one piece gives, from pages in any order with NaN behind the tokens.

Small cases run interpreted; the same cases run on hardware (`pytest -m gpu`, `pytest -m tpu`).
"""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import numpy as np
import paged_case
import pytest
from cuda_offline import lower
from sweep import sweep

import xsake
from xsake.kernels_pallas_gpu.hopper import backend as mosaic

# A bits=True case has the same lists and tiles in pages and in one piece, so that it adds in the same order.
CASES = {
    "decode, dense, different lengths": dict(lengths=[200, 70], q_len=1, pages=2, heads=(6, 1)),
    "decode, 4 queries, lists": dict(lengths=[300], q_len=4, pages=3, blocks=(64, 128), heads=(12, 2), bits=True),
    "decode, a list per head, window and sinks": dict(
        lengths=[190, 256],
        q_len=1,
        pages=2,
        blocks=(64, 128),
        heads=(2, 1),
        list_heads=2,
        local_window_size=(150, 0),
        sinks=jnp.array([0.5, -1.0]),
        bits=True,
    ),
    "full pages, no lengths, group of 1": dict(
        lengths=None, q_len=2, pages=2, heads=(2, 2), blocks=(64, 128), causal=False, bits=True
    ),
    "a chunk, dense": dict(lengths=[200], q_len=128, pages=2, heads=(1, 1)),
    "a chunk, lists, group of 6": dict(
        lengths=[250, 129], q_len=128, pages=2, heads=(6, 1), blocks=(64, 128), density=0.7, bits=True
    ),
    "a chunk, blocks of 64, pages of 64": dict(
        lengths=[150], q_len=128, pages=3, page=64, heads=(2, 1), blocks=(64, 64), bits=True
    ),
    "blocks longer than pages, the last block ends past them": dict(
        lengths=[170], q_len=1, pages=3, page=64, blocks=(64, 128), density=1.0
    ),
    "nothing attends": dict(lengths=[0, 40], q_len=1, pages=1, bits=False),
    "a soft cap": dict(lengths=[170], q_len=3, pages=2, logits_soft_cap=3.0),
}
IN_CI = {
    "mosaic_gpu": ["a soft cap"],
    "triton": ["decode, dense, different lengths"],
    "mosaic_tpu": [],
}
HARDWARE = {"mosaic_gpu": pytest.mark.gpu, "triton": pytest.mark.gpu, "mosaic_tpu": pytest.mark.tpu}


def runs() -> list:
    found = []
    for implementation, in_ci in IN_CI.items():
        for name, given in CASES.items():
            if implementation == "mosaic_tpu" and given.get("page", 128) < 128:
                continue
            slow = () if name in in_ci else (pytest.mark.slow,)
            found.append(pytest.param(implementation, True, name, id=f"{implementation}-interpret-{name}", marks=slow))
            of_chip = HARDWARE[implementation]
            found.append(pytest.param(implementation, False, name, id=f"{implementation}-{name}", marks=of_chip))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kernels", "interpret", "name"), runs())
def test_pages_give_what_one_piece_gives(request, kernels, interpret, name):
    given = dict(CASES[name])
    if kernels == "mosaic_tpu":
        given["dim"] = 128
        if interpret:
            request.getfixturevalue("strict_tpu_interpreter")
    bits = given.pop("bits", False)
    case = paged_case.make(**given)
    with xsake.interpret() if interpret else contextlib.nullcontext():
        found = case.paged(kernels)
        expected = case.plain(kernels) if bits else None
    assert not any(jnp.isnan(x).any() for x in found)
    for a, b in zip(found, case.paged("xla"), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02)
    if expected is not None:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name", sweep(paged_case.COMPILED, slow=[name for name in paged_case.COMPILED if name != "decode"])
)
def test_hopper_lowers(name):
    call = paged_case.call(**paged_case.COMPILED[name])
    assert mosaic.unsupported(call) is None
    config = mosaic.default_config(call)
    text = lower(lambda call: mosaic.forward(call, config), call)
    assert "mosaic_gpu" in text
    # The pages go to the kernel as they are: nothing else of their size is made.
    pages = "x".join(map(str, call.key.shape))
    used = [line.split("=")[1] for line in text.splitlines() if pages in line and "func.func" not in line]
    assert all("stablehlo.reshape" in line for line in used), used
