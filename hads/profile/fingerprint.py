"""Fingerprints of calibration texts, so that nobody evaluates on these texts, whole, in part or shifted.

A fingerprint is the digest of a whole sequence and, after a colon, hashes of some of its runs of RUN tokens. Which runs
are kept depends on their tokens alone (one run in KEPT, by its hash), so that a text that begins elsewhere, or that
holds only a part of the sequence, keeps the same ones. 8192 tokens make about 3 kB.

Profiles of older versions hold digests without runs: they know their own sequences only whole.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

import numpy as np

RUN = 16  # tokens: longer than idioms that texts share by chance
KEPT = 16


def digest(tokens: np.ndarray) -> str:
    """A short name made from a sequence's tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()[:16]


def fingerprint(tokens: np.ndarray) -> str:
    """
    >>> text = np.random.default_rng(0).integers(0, 1000, 2000)
    >>> seen = [fingerprint(text[:1500])]
    >>> shared(text[:1500], seen), shared(text[100:1000], seen), shared(text[::-1], seen)
    (1.0, 1.0, 0.0)
    """
    runs = base64.b64encode(kept_runs(tokens).astype("<u4").tobytes()).decode()
    return f"{digest(tokens)}:{runs}"


def shared(tokens: np.ndarray, fingerprints: Iterable[str]) -> float:
    """The share of a text's kept runs that the sequences of the fingerprints hold; 1 if the text is one of them.

    Raises ValueError if a fingerprint is damaged.
    """
    parsed = [_parse(one) for one in fingerprints]
    if digest(tokens) in {whole for whole, _ in parsed}:
        return 1.0
    runs = kept_runs(tokens)
    if not len(runs) or not parsed:
        return 0.0
    return float(np.isin(runs, np.concatenate([known for _, known in parsed])).mean())


def knows_runs(fingerprints: Iterable[str]) -> bool:
    """Whether parts of the sequences would be recognised, and not only whole sequences."""
    return all(":" in one for one in fingerprints)


def check(fingerprints: Iterable[str]) -> None:
    """Raise ValueError if one is damaged."""
    for one in fingerprints:
        _parse(one)


def kept_runs(tokens: np.ndarray) -> np.ndarray:
    """u32[N], sorted, each once: hashes of the runs that a fingerprint keeps."""
    tokens = np.asarray(tokens).astype(np.uint64)
    count = max(len(tokens) - RUN + 1, 0)
    mixed = np.zeros(count, np.uint64)
    for n in range(RUN):
        mixed = (mixed ^ tokens[n : n + count]) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
        mixed ^= mixed >> np.uint64(29)
    return np.unique((mixed[mixed % np.uint64(KEPT) == 0] >> np.uint64(32)).astype(np.uint32))


def _parse(one: str) -> tuple[str, np.ndarray]:
    whole, _, runs = one.partition(":")
    try:
        return whole, np.frombuffer(base64.b64decode(runs, validate=True), "<u4")
    except ValueError as error:
        raise ValueError(f"the fingerprint {one[:24]!r} of a calibration text is damaged: {error}") from error
