"""As much haystack as fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(cost: Callable[[int], int], limit: int, *, least: int, most: int) -> int:
    """The largest size from `least` to `most` that costs at most `limit`, for a cost that rises about evenly.

    Few costs are asked for: each is a whole prompt to be made and cut into tokens. Raises ValueError if `least` costs
    more than `limit`.

    >>> largest(lambda size: 100 + 3 * size, 1000, least=1, most=10**6)
    300
    """
    base = spent = cost(least)
    if base > limit:
        raise ValueError(f"the smallest prompt has {base} tokens, and only {limit} are allowed")
    low, high, too_much = least, most + 1, 0
    for step in range(1000):
        if high - low <= 1:
            break
        if too_much and step > 12:  # an uneven cost: halve
            probe = (low + high) // 2
        elif too_much:
            probe = low + int((limit - spent) / (too_much - spent) * (high - low))
        elif low > least:
            probe = low + int((limit - spent) * (low - least) / max(spent - base, 1))
        else:
            probe = low + max(least, 64)
        probe = min(max(probe, low + 1), high - 1)
        found = cost(probe)
        if found <= limit:
            low, spent = probe, found
        else:
            high, too_much = probe, found
    return low
