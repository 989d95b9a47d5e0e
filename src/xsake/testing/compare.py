"""Comparison against float64: the tolerance is the error that a plain computation in the same precision makes."""

from __future__ import annotations

import numpy as np


def assert_close_to_float64(name: str, actual, exact, plain, noise, *, factor: float = 4.0) -> None:
    """`actual` must be as near to `exact` (float64) as `plain` is (the dense formula in the precision of the inputs).

    Both the largest and the root-mean-square error may be `factor` times those of `plain`. `noise`, the error of one
    rounding of the summands, is the least that counts as the error of `plain`: results may be small by cancellation, or
    exact in `plain` by luck. Where `exact` is not finite, `actual` must be the same.
    """
    actual, exact, plain = (np.asarray(x).astype(np.float64) for x in (actual, exact, plain))
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    odd = ~np.isfinite(exact)
    wrong = np.where(odd, ~((actual == exact) | (np.isnan(actual) & np.isnan(exact))), ~np.isfinite(actual))
    if wrong.any():
        at = [tuple(map(int, c)) for c in np.argwhere(wrong)[:4]]
        pairs = ", ".join(f"{c}: {actual[c]} instead of {exact[c]:.6g}" for c in at)
        raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.size} elements are not finite as expected: {pairs}")
    zeroed = np.where(odd, 0.0, exact)
    error = np.abs(np.where(odd, 0.0, actual) - zeroed)
    allowed = np.abs(np.where(odd, 0.0, plain) - zeroed)
    assert np.isfinite(allowed).all(), f"{name}: the yardstick is not finite where float64 is"
    largest, rms = _largest(error), _rms(error)
    may_largest = factor * max(_largest(allowed), noise)
    may_rms = factor * max(_rms(allowed), noise / 2)
    if largest > may_largest or rms > may_rms:
        order = np.argsort(error, axis=None)[::-1][:4]
        at = [tuple(map(int, np.unravel_index(i, error.shape))) for i in order]
        worst = ", ".join(f"{c}: {actual[c]:.6g} instead of {exact[c]:.6g}" for c in at)
        raise AssertionError(
            f"{name}: max error {largest:.3g} (allowed {may_largest:.3g}), "
            f"RMS error {rms:.3g} (allowed {may_rms:.3g}); "
            f"{int((error > may_largest).sum())} of {error.size} elements are off; worst at {worst}"
        )


def _largest(x: np.ndarray) -> float:
    return float(x.max()) if x.size else 0.0


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
