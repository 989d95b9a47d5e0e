"""`xsake.compat.flex` beside torch's own flex_attention: mods that are written once and run by both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention import flex_attention as torch_flex

from xsake.compat import flex

B, H, K, T, S, D = 2, 4, 2, 70, 90, 16
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(H, T + S)).astype(np.float32)
DOCUMENTS = np.sort(RNG.integers(0, 4, (B, S)), -1).astype(np.int32)


def mods(xp: Any, array: Callable) -> dict[str, tuple[Callable | None, Callable | None]]:
    """(score_mod, mask_mod), in jax.numpy or torch."""
    table, documents, slopes = array(TABLE), array(DOCUMENTS), array(np.float32([0.5, 0.25, 0.125, 0.0625]))
    minus_infinity = array(np.float32(-np.inf))

    def causal(b, h, q, kv):
        return q >= kv

    def alibi(score, b, h, q, kv):
        return score + slopes[h] * (kv - q)

    def relative(score, b, h, q, kv):
        return score + table[h, q - kv + S]

    def cap(score, b, h, q, kv):
        return 5 * xp.tanh(score / 5)

    return {
        "causal": (None, causal),
        "a window": (None, lambda b, h, q, kv: (q >= kv) & (q - kv <= 9)),
        "documents": (None, lambda b, h, q, kv: (documents[b, q] == documents[b, kv]) & (q >= kv)),
        "a prefix": (None, lambda b, h, q, kv: (q >= kv) | (kv < 20)),
        "no rule, and rows that attend nothing": (None, lambda b, h, q, kv: ((q * kv) % 7 == 3) & (q % 2 == 1)),
        "a soft cap": (cap, causal),
        "ALiBi": (alibi, causal),
        "a table": (relative, None),
        "a table, then a cap": (lambda score, *at: cap(relative(2 * score, *at), *at), causal),
        "deleted scores": (lambda score, b, h, q, kv: xp.where(q - kv < 12, score, minus_infinity), causal),
    }


def main() -> None:
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in ((B, H, T, D), (B, K, S, D), (B, K, S, D))]
    theirs, ours = mods(torch, torch.tensor), mods(jnp, jnp.asarray)
    for name in theirs:
        found, wanted = by_jax(*ours[name], arrays), by_torch(*theirs[name], arrays)
        for of, a, b in zip(("output", "lse"), found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=f"{name}: {of}")
        print(f"{name:40}{max(map(largest_difference, found, wanted)):.1e}", flush=True)


def by_torch(score_mod: Any, mask_mod: Any, arrays: list) -> list[np.ndarray]:
    mask = None if mask_mod is None else torch_flex.create_block_mask(mask_mod, B, H, T, S, device="cpu")
    given = map(torch.from_numpy, arrays)  # without gradients: on a CPU, torch refuses them
    return [x.numpy() for x in torch_flex.flex_attention(*given, score_mod, mask, enable_gqa=True, return_lse=True)]


def by_jax(score_mod: Any, mask_mod: Any, arrays: list) -> list[np.ndarray]:
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, B, H, T, S)
    run = jax.jit(lambda *given: flex.flex_attention(*given, score_mod, mask, enable_gqa=True, return_lse=True))
    return [np.asarray(x) for x in run(*arrays)]


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b, where=np.isfinite(b), out=np.zeros_like(b)).max())


if __name__ == "__main__":
    main()
