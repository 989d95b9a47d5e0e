"""Contestants by name: the implementations of `xsake.attention`, dense attention, and attention of other projects."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

import xsake
from xsake._op import registry
from xsake._race.course import Course

OURS = registry.CONTESTANTS[0]  # what a call without a name runs
# How to install what a peer needs.
_PEERS = {
    "dense": "comes with JAX: cuDNN on a GPU, XLA elsewhere",
    "cudnn": "comes with JAX for NVIDIA GPUs: pip install 'jax[cuda13]'",
    "tokamax": "pip install tokamax",
    "flex": "pip install torch, for NVIDIA GPUs",
    "fa4": "pip install flash-attn-4, for NVIDIA GPUs",
}
_DENSE = ("dense", "cudnn", "tokamax")  # they compute all blocks, whatever the mask says
_OF_TORCH = ("flex", "fa4")


def sparse(query: Array, key: Array, value: Array, mask: xsake.BlockMask) -> Array:
    """Attention as a call without a name runs it."""
    return xsake.attention(query, key, value, mask)


def dense(by: str = "cudnn", *, is_causal: bool = True) -> Callable[..., Array]:
    """Dense attention as JAX has it."""
    return partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation=by)


def check_names(names: list[str]) -> None:
    """ValueError for a name that nobody has."""
    known = {OURS, *_PEERS, *registry.names()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"contestants {unknown} are unknown; there are {', '.join(sorted(known))}")


def is_dense(name: str) -> bool:
    return name in _DENSE


def contestant(name: str, course: Course, mask: xsake.BlockMask) -> Callable[[], Any]:
    """A compiled contestant. ModuleNotFoundError, with how to install it, where a peer is not here."""
    if name in _OF_TORCH:
        try:
            return importlib.import_module(f"xsake._race.peers.{name}").contestant(course, mask)
        except ImportError as error:
            raise ModuleNotFoundError(f"not here ({error}): {_PEERS[name]}") from error
    if name in _DENSE:
        return course.compiled(_dense(name, is_causal=course.workload.is_causal))
    implementation = None if name == OURS else name
    return course.compiled(sparse if implementation is None else partial(xsake.attention, implementation=name), mask)


def _dense(name: str, *, is_causal: bool) -> Callable[..., Array]:
    gpu = jax.default_backend() == "gpu"
    if name == "cudnn" and not gpu:
        raise ModuleNotFoundError(f"not here (JAX sees no GPU): {_PEERS[name]}")
    if name != "tokamax":
        return dense("cudnn" if gpu else "xla", is_causal=is_causal)
    try:
        tokamax = importlib.import_module("tokamax")
    except ImportError as error:
        raise ModuleNotFoundError(f"not here ({error}): {_PEERS[name]}") from error
    return partial(tokamax.dot_product_attention, is_causal=is_causal)


def waiter(name: str) -> Callable[[Any], Any]:
    """The function that waits for a contestant's result."""
    if name in _OF_TORCH:
        return importlib.import_module("xsake._race.peers.by_torch").wait
    return jax.block_until_ready
