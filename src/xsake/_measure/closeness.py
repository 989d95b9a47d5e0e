"""Whether results are right: as near to float64 as a plain computation in the same precision is, times a factor.

`xsake check`, races and the tuner all ask this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

FACTOR = 4.0  # error that is allowed / error of the plain computation


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """The exact result, and the largest and the root-mean-square error that are allowed of others."""

    exact: np.ndarray
    allowed_max: float
    allowed_rms: float

    @classmethod
    def of(cls, exact: Any, plain: Any, noise: tuple[float, float], factor: float = FACTOR) -> Yardstick:
        """`noise`, (largest, RMS), is the least that counts as the error of `plain`: results may be small by
        cancellation, or exact in `plain` by luck. ValueError where `plain` is not finite but `exact` is."""
        exact, plain = _doubles(exact), _doubles(plain)
        finite = np.isfinite(exact)
        error = np.abs(np.where(finite, plain, 0.0) - np.where(finite, exact, 0.0))
        if not np.isfinite(error).all():
            raise ValueError("the yardstick is not finite where float64 is")
        return cls(exact, factor * max(_largest(error), noise[0]), factor * max(_rms(error), noise[1]))

    def problem(self, name: str, actual: Any) -> str | None:
        """What is wrong with a result, with its worst elements, or None."""
        return self.compare(name, actual)[1]

    def compare(self, name: str, actual: Any) -> tuple[dict[str, float], str | None]:
        """The errors of a result, and what is wrong; where the exact result is not finite, it must be the same."""
        actual = _doubles(actual)
        if actual.shape != self.exact.shape:
            return {}, f"{name}: shape {actual.shape}, expected {self.exact.shape}"
        with np.errstate(invalid="ignore"):
            error = np.abs(actual - self.exact)
        found = self._told(error)
        return found, None if self._allows(found) else self._problem(name, actual, error)

    def _told(self, error: np.ndarray) -> dict[str, float]:
        allowed = {"allowed_max": self.allowed_max, "allowed_rms": self.allowed_rms}
        return {"max": _largest(error), "rms": _rms(error)} | allowed

    def _allows(self, found: Mapping[str, float]) -> bool:
        return found["max"] <= self.allowed_max and found["rms"] <= self.allowed_rms  # false where something is NaN

    def _problem(self, name: str, actual: np.ndarray, error: np.ndarray) -> str | None:
        odd = ~np.isfinite(self.exact)
        same = (actual == self.exact) | (np.isnan(actual) & np.isnan(self.exact))
        wrong = np.where(odd, ~same, ~np.isfinite(actual))
        if wrong.any():
            at = [tuple(map(int, c)) for c in np.argwhere(wrong)[:4]]
            pairs = self._pairs(actual, at)
            return f"{name}: {int(wrong.sum())} of {wrong.size} elements are not finite as expected: {pairs}"
        error[odd] = 0.0
        found = self._told(error)
        if self._allows(found):
            return None
        order = np.argsort(error, axis=None)[::-1][:4]
        at = [tuple(map(int, np.unravel_index(i, error.shape))) for i in order]
        return (
            f"{name}: max error {found['max']:.3g} (allowed {self.allowed_max:.3g}), "
            f"RMS error {found['rms']:.3g} (allowed {self.allowed_rms:.3g}); "
            f"{int((error > self.allowed_max).sum())} of {error.size} elements are off; "
            f"worst at {self._pairs(actual, at)}"
        )

    def _pairs(self, actual: np.ndarray, at: list[tuple[int, ...]]) -> str:
        return ", ".join(f"{c}: {actual[c]:.6g} instead of {self.exact[c]:.6g}" for c in at)


@dataclasses.dataclass(frozen=True)
class Correctness:
    """The errors of each result by its name; `problem` says what is wrong, or is None."""

    errors: dict[str, dict[str, float]]
    problem: str | None

    @classmethod
    def of(cls, results: Mapping[str, Any], yardsticks: Mapping[str, Yardstick]) -> Correctness:
        compared = {name: yardsticks[name].compare(name, x) for name, x in results.items()}
        problems = [problem for _, problem in compared.values() if problem is not None]
        return cls({name: errors for name, (errors, _) in compared.items()}, "; ".join(problems) or None)


def _doubles(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _largest(x: np.ndarray) -> float:
    return float(x.max()) if x.size else 0.0


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
