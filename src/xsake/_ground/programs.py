"""The compiled programs of calls outside `jax.jit`, of which a process keeps only the newest.

JAX keeps the programs of a jitted function as long as the function lives. On a CPU, a program of attention takes up to
200 memory maps, and Linux allows a process 65,530: without a bound, some hundreds of lengths would use them up.
JAX bounds the programs of single operations itself: 8192 were seen to take 25,000 maps, for which `KEPT` leaves room.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

KEPT = 128


def newest_programs[*Static](make: Callable[[*Static], Callable]) -> Callable[[*Static], Callable]:
    """Decorate `make`, which makes a function of arrays for static arguments.

    The function then runs as one program, and is inlined where the caller traces.

    The newest `KEPT` programs of all such functions are kept, each for its static arguments and for the tree, shapes
    and dtypes of its arrays. A program that was dropped is compiled again when it is called.
    """

    def of(*static: *Static) -> Callable:
        def run(*arrays: Any) -> Any:
            leaves, tree = jax.tree.flatten(arrays)
            return program(make, static, tree, tuple((x.shape, x.dtype) for x in leaves))(*arrays)

        return run

    return of


@lru_cache(maxsize=KEPT)
def program(make: Callable, static: tuple, tree: Any, shapes: tuple) -> Callable:
    function = make(*static)

    # JAX drops the programs of a function when nothing else holds the function. JAX also keeps rules of custom_vmap,
    # which may hold `function`: so jit another function, which no rule holds.
    def run(*arrays: Any) -> Any:
        return function(*arrays)

    run.__name__ = make.__name__.strip("_")
    return jax.jit(run, inline=True)
