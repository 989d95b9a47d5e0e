"""Programs that are compiled side by side, before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Programs:
    """Compilations under way, by key. JAX caches programs: a later call of the same function finds its program."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=12)
        self._under_way: dict[Any, Future] = {}

    def compile(self, key: Any, lower: Callable[[], Any]) -> None:
        """Begin to compile the program that `lower()` returns, unless `key` is under way already."""
        if key not in self._under_way:
            self._under_way[key] = self._pool.submit(lambda: lower().compile())

    def wait_for(self, *keys: Any) -> None:
        for key in keys:
            if key in self._under_way:
                self._under_way.pop(key).result()
