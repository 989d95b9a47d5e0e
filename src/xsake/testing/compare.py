"""Comparison against float64: the tolerance is the error that a plain computation in the same precision makes."""

from __future__ import annotations

from xsake._measure.closeness import FACTOR, Yardstick


def assert_close_to_float64(name: str, actual, exact, plain, noise, *, factor: float = FACTOR) -> None:
    """`actual` must be as near to `exact` (float64) as `plain` is (the dense formula in the precision of the inputs).

    Both the largest and the root-mean-square error may be `factor` times those of `plain`. `noise`, the error of one
    rounding of the summands, is the least that counts as the error of `plain`: results may be small by cancellation, or
    exact in `plain` by luck. Where `exact` is not finite, `actual` must be the same.
    """
    try:
        yardstick = Yardstick.of(exact, plain, (noise, noise / 2), factor)
    except ValueError as error:
        raise AssertionError(f"{name}: {error}") from error
    if problem := yardstick.problem(name, actual):
        raise AssertionError(problem)
