"""A model of transformers during calibration: its attention, seen through torch's own forward and backward.

While a model is watched, every call of its attention is dense and is shown to a watcher, which gives back the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
import torch
from jax import Array

from xsake.hads.calibration.by_layer import KeptBlocks
from xsake.hads.calibration.layerwise import split_windows
from xsake.hads.calibration.observe import CHUNK, Observation, Touched, observation, signed_likelihood
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.steps import Steps
from xsake.hads.calibration.whole import layers_at_once
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rules import Rules
from xsake.torch.crossing import to_jax, to_torch


class Seen(NamedTuple):
    """One call of attention: query [B, H, T, D], keys and values [B, K, S, D], output [B, T, H, D]."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    rules: Rules
    is_causal: bool


Watcher = Callable[[Seen], torch.Tensor]
_watchers: WeakKeyDictionary[torch.nn.Module, Watcher] = WeakKeyDictionary()


def is_watched(module: Any) -> bool:
    return module in _watchers


def shown(module: Any, **seen: Any) -> torch.Tensor:
    """The output of a call of this module's attention, after its watcher saw it."""
    return _watchers[module](Seen(module.layer_idx, **seen))


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that have the number of a layer. ValueError if there are none."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers with a layer_idx, by which HADS knows them")
    return layers


def weights_of(model: torch.nn.Module) -> dict[str, Array]:
    """The model's weights, in the same memory."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return {name: to_jax(x.detach().contiguous()) for name, x in model.named_parameters() if x.dtype in kinds}


class WatchedModel:
    """`calibration.whole.Watched` for a model of transformers that attends by xsake.

    A forward keeps the observations of some layers, and a backward torch's activations of one sequence, and all logits.
    """

    def __init__(self, model: torch.nn.Module):
        self._model, self._layers = model, layers_of(model)
        self._device = next(model.parameters()).device
        calls: list[Seen] = []

        def note(seen: Seen) -> torch.Tensor:
            calls.append(seen)
            return seen.out

        with self._watched(note), torch.no_grad():
            self._logits(np.arange(2)[None])
        numbers = [seen.layer for seen in calls]
        if numbers != list(range(len(numbers))) or not numbers:
            raise ValueError(
                f"attention by xsake was called for layers {numbers}, and HADS needs each once, from 0 on: "
                "a decoder of transformers whose every layer attends by xsake"
            )
        heads = {(seen.query.shape[1], seen.key.shape[1], seen.query.shape[3]) for seen in calls}
        if len(heads) > 1:
            raise NotImplementedError(f"layers differ in (query heads, KV heads, head_dim): {sorted(heads)}")
        if any(not seen.is_causal for seen in calls):
            raise NotImplementedError("HADS chooses blocks for causal attention only, and this model's is not")
        self._heads, self._dtype = heads.pop(), to_jax(calls[0].query.new_zeros(1)).dtype
        self.window, self.windowed = split_windows([seen.rules.window for seen in calls])
        self._chosen = [number for number in numbers if number not in self.windowed]
        self.number = len(self._chosen)

    def checksums(self) -> list[str]:
        return [str(float(x.detach().float().sum())) for x in self._model.parameters()]

    def observe(
        self, tokens: Array | np.ndarray, grid: CausalGrid, steps: Steps, first: int
    ) -> Iterator[list[Observation]]:
        """The model runs once for as many layers as have `whole.AT_ONCE` bytes of observations."""
        q_heads, kv_heads, width = self._heads
        shapes = (jax.ShapeDtypeStruct((1, grid.length, n, width), self._dtype) for n in (q_heads, kv_heads))
        together = layers_at_once(jax.eval_shape(partial(observation, grid=grid), *shapes), len(tokens))
        for begin in range(first, self.number, together):
            group = self._chosen[begin : begin + together]
            found: list[dict[int, Any]] = []

            def look(seen: Seen, group: list[int] = group, found: list[dict[int, Any]] = found) -> torch.Tensor:
                if seen.layer in group:
                    query, key = (_tokens_first(x) for x in (seen.query, seen.key))
                    found[-1][seen.layer] = jax.device_get(_observation(query, key, seen.rules, grid))
                return seen.out

            with self._watched(look), torch.no_grad():
                for row in np.asarray(tokens):
                    found.append({})
                    self._logits(row[None])
            for number in group:
                yield [jax.tree.map(jax.numpy.asarray, one[number]) for one in found]

    def costs(self, tokens: Array, kept: KeptBlocks, grid: CausalGrid, key: Array) -> np.ndarray:
        seen: list[Seen] = []

        def keep(one: Seen) -> torch.Tensor:
            if not one.out.requires_grad:
                one.out.requires_grad_()  # the first layer: the weights need no gradients
            seen.append(one)
            return one.out

        with self._watched(keep), torch.enable_grad():
            logits = self._logits(np.asarray(tokens))
        down = to_torch(_likelihood_gradient(to_jax(logits.contiguous()), key))
        gradients = torch.autograd.grad(logits, [one.out for one in seen], down)
        rows = {layer: row for row, layer in enumerate(self._chosen)}
        found = []
        for one, gradient in zip(seen, gradients, strict=True):
            if one.layer in rows:
                query, keys, value = (_tokens_first(x) for x in (one.query, one.key, one.value))
                touched = Touched(one.rules.scaled(query), keys, value, to_jax(gradient.contiguous()))
                found.append(np.asarray(cost_of_dropping(touched, kept(rows[one.layer]), grid), np.float64))
        return np.stack(found)

    def _logits(self, tokens: np.ndarray) -> torch.Tensor:
        ids = torch.tensor(np.asarray(tokens, np.int64), device=self._device)
        return self._model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    @contextmanager
    def _watched(self, watcher: Watcher) -> Iterator[None]:
        """The model as it is read, without dropout and without gradients of its weights."""
        training = [module for module in self._model.modules() if module.training]
        learning = [x for x in self._model.parameters() if x.requires_grad]
        try:
            self._model.eval()
            for x in learning:
                x.requires_grad_(False)
            _watchers.update(dict.fromkeys(self._layers, watcher))
            yield
        finally:
            for module in self._layers:
                _watchers.pop(module, None)
            for module in training:
                module.training = True
            for x in learning:
                x.requires_grad_()


def _tokens_first(x: torch.Tensor) -> Array:
    return to_jax(x.transpose(1, 2).contiguous())


@partial(jax.jit, static_argnames=("rules", "grid"))
def _observation(query: Array, key: Array, rules: Rules, grid: CausalGrid) -> Observation:
    return observation(rules.scaled(query), key, grid)


@jax.jit
def _likelihood_gradient(logits: Array, key: Array) -> Array:
    def likelihood(logits: Array) -> Array:
        return signed_likelihood(lambda x: x, logits.astype(jax.numpy.float32), key, CHUNK)

    return jax.grad(likelihood)(logits)
