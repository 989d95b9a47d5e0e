"""A text as the HADS explorer shows it: every block's true mass, and which blocks each method keeps at each budget.

Masks are those of `xsake evaluate`: all methods keep equally many blocks in every layer, chosen from the sparse model's
own queries and keys, and the KL is that of the whole model with these masks.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.dashboard.read.coding import encode_levels, encode_mask, lower_triangle
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.calibration.observe import observe_block
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study import layerwise
from xsake.hads.study.divergence import compare
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.methods.shipped import METHODS

BUDGETS = (0.1, 0.2, 0.3, 0.43, 0.6)  # of these, the smallest three that cover the blocks that are always on
METHOD_TITLES = {
    "hads": "HADS",
    "hads_group": "HADS, one mask per KV head",
    "hads_no_exact_rows": "HADS, without exact rows",
    "sink_window": "sink and window",
    "mean_top_k": "mean-pooled top-k",
    "x_attention_8": "XAttention, stride 8",
    "x_attention_16": "XAttention, stride 16",
    "flash_prefill": "FlashPrefill",
    "oracle_top_k": "oracle: true top-k",
    "oracle_gain": "oracle: HADS's rule on true masses",
}
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Seen:
    """One layer under dense attention, over the causal blocks: f32[H, blocks]."""

    mass: np.ndarray
    cost: np.ndarray


class Recorder:
    """A model with its profile and tokenizer. `record` computes one recording; compiled programs are kept."""

    def __init__(
        self,
        model: Any,
        profile: HadsProfile,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ):
        self._model, self._profile = model, profile
        self._encode, self._decode = encode, decode
        self._layers = Layers(model)
        # Without the digests, which are static: the compiler must not tell profiles apart.
        self._on_device = profile.on_device()

    @classmethod
    def load(cls, model: str, profile: HadsProfile | Path | None = None) -> Recorder:
        """A published model or a model file; by default the shipped profile."""
        from xsake.model import load_pretrained, load_tokenizer, open_model

        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        weights = open_model(model)
        tokenizer = load_tokenizer(weights)
        profile = HadsProfile.shipped(model) if profile is None else profile
        learned = HadsProfile.load(profile) if isinstance(profile, Path) else profile
        loaded = load_pretrained(weights, dtype=dtype, param_dtype=dtype)
        return cls(loaded, learned, encode=tokenizer.encode, decode=tokenizer.decode)

    def record_text(
        self,
        text: str,
        *,
        identity: str,
        title: str,
        length: int,
        methods: Sequence[str],
        budgets: Sequence[float] | None = None,
        progress: Progress | None = None,
        about: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The recording of the text's first `length` tokens; `about` replaces or adds to its description.

        Raises ValueError if the text is too short, a method is unknown, or a budget does not cover the blocks that are
        always on.
        """
        tokens = np.asarray(self._encode(text)[:length], np.int32)
        grid = self._profile.grid(max(len(tokens), 1))
        grid.check_choice("the text:")
        if unknown := [name for name in methods if name not in METHODS]:
            raise ValueError(f"unknown methods {unknown}; there are {', '.join(METHODS)}")
        if budgets is None:
            budgets = [budget for budget in BUDGETS if budget * grid.blocks >= grid.forced_blocks + 1][:3]
        counts = {budget: layer_counts(self._profile, budget, grid.length) for budget in budgets}
        return _Recording(self, tokens, grid, counts, list(methods), progress or (lambda stage, done, of: None)).make(
            {"id": identity, "title": title, "text": {"name": title, "domain": None}} | (about or {})
        )


@dataclasses.dataclass
class _Recording:
    _r: Recorder
    _tokens: np.ndarray
    _grid: CausalGrid
    _counts: dict[float, np.ndarray]
    _methods: list[str]
    _progress: Progress
    _done: int = 0

    @property
    def _shown(self) -> CausalGrid:
        """Square blocks, of which a taller row is several."""
        return dataclasses.replace(self._grid, block_q=self._grid.block)

    def _as_shown(self, rows: np.ndarray) -> np.ndarray:
        """[..., rows, n] of the grid that is chosen from, as rows of the grid that is shown."""
        return np.repeat(rows, self._grid.tall, -2)[..., : self._shown.rows, :]

    @property
    def _of(self) -> int:
        """How many steps the recording takes."""
        return len(self._r._layers.weights) * (1 + len(self._methods) * len(self._counts))

    def make(self, about: dict[str, Any]) -> dict[str, Any]:
        profile, batch = self._r._profile, jnp.asarray(self._tokens[None])
        dense, seen = self._observe(batch)
        shares: dict[str, Any] = {}
        kept_mass: dict[str, Any] = {}
        masks: dict[str, dict[str, list[np.ndarray]]] = {}
        results = []
        for method in self._methods:
            for budget, counts in self._counts.items():
                states, kept, share = self._run(batch, method, budget, counts)
                compared = jax.device_get(compare(self._r._model, dense, states, batch))
                results.append(_result(method, budget, float(share.mean()), compared, self._grid))
                shares.setdefault(method, {})[key(budget)] = [_round(layer) for layer in share]
                kept_mass.setdefault(method, {})[key(budget)] = [
                    _round((layer * one.mass).sum(-1) / self._shown.rows) for layer, one in zip(kept, seen, strict=True)
                ]
                masks.setdefault(method, {})[key(budget)] = kept
        description = {
            "model": profile.model,
            "length": self._grid.length,
            **self._grid.shape,
            "side": self._shown.rows,
            "layers": profile.layers,
            "heads": profile.q_heads,
            "budgets": list(self._counts),
            "methods": self._methods,
            "environment": {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "commit": None,
                "command": None,
            },
            "method_titles": {name: METHOD_TITLES.get(name, name.replace("_", " ")) for name in self._methods},
            "oracles": [name for name in self._methods if name.startswith("oracle")],
            "blocks": self._blocks(),
            "loss": float(np.asarray(compared.loss[0], np.float64).sum() / (self._grid.length - 1)),
            "shares": shares,
            "kept_mass": kept_mass,
            "results": results,
            "detail": None,
        }
        layers = [self._layer(number, one, masks) for number, one in enumerate(seen)]
        return {"about": description | about, "layers": layers}

    def _step(self, stage: str) -> None:
        self._progress(stage, self._done, self._of)
        self._done += 1

    def _observe(self, batch: Array) -> tuple[Array, list[Seen]]:
        """The dense model's final states, and each layer's masses and costs."""
        layers, profile = self._r._layers, self._r._profile
        x, rotation = layers.start(batch)
        weight = self._as_shown(self._grid.row_weights()[:, None])
        seen = []
        for number, weights in enumerate(layers.weights):
            self._step("dense attention")
            x, one = observe_block(layers.graph, layers.model.attention_fn, weights, x, rotation, self._shown)
            share = np.asarray(one.statistics.share[0], np.float64)
            omega, phi = (np.asarray(v)[number][:, None, None] for v in (profile.sensitivity, profile.burstiness))
            cost = omega * weight * share * (share + phi)
            seen.append(Seen(lower_triangle(np.asarray(one.statistics.mass[0])), lower_triangle(cost)))
        return layers.model.norm(x), seen

    def _run(
        self, batch: Array, method: str, budget: float, counts: np.ndarray
    ) -> tuple[Array, list[np.ndarray], np.ndarray]:
        """The sparse model's final states, each layer's kept blocks, bool[H, blocks], and their shares f64[L, H]."""
        mask_fn = MethodMask.of(method, self._r._on_device, counts)
        kept: list[np.ndarray] = []

        def watch(blocks: Any, *_: Any) -> None:
            self._step(f"{METHOD_TITLES.get(method, method)} at {budget:.0%}")
            kept.append(lower_triangle(self._as_shown(np.asarray(blocks[0]))))

        states, active = layerwise.run(self._r._layers, batch, mask_fn, watch=watch)
        return states, kept, np.asarray(active, np.float64)[:, 0] / self._grid.blocks

    def _blocks(self) -> list[dict[str, Any]]:
        starts = range(0, self._grid.length, self._grid.block)
        ends = [min(start + self._grid.block, self._grid.length) for start in starts]
        return [
            {"start": start, "end": end, "text": self._r._decode(self._tokens[start:end].tolist())}
            for start, end in zip(starts, ends, strict=True)
        ]

    def _layer(self, number: int, seen: Seen, masks: dict[str, dict[str, list[np.ndarray]]]) -> dict[str, Any]:
        profile = self._r._profile
        heads = []
        for head in range(profile.q_heads):
            scale = float(seen.cost[head].max()) or 1.0
            heads.append(
                {
                    "head": head,
                    "sensitivity": float(f"{profile.sensitivity[number, head]:.4g}"),
                    "burstiness": float(f"{profile.burstiness[number, head]:.4g}"),
                    "mass": encode_levels(seen.mass[head]),
                    "cost": encode_levels(seen.cost[head] / scale),
                    "cost_scale": float(f"{scale:.4g}"),
                    "kept": {
                        method: {budget: encode_mask(kept[number][head]) for budget, kept in by_budget.items()}
                        for method, by_budget in masks.items()
                    },
                }
            )
        return {"layer": number, "side": self._shown.rows, "heads": heads}


def key(budget: float) -> str:
    """A budget as a key: as JavaScript writes the number.

    >>> key(0.2), key(1.0)
    ('0.2', '1')
    """
    return f"{budget:.12g}"


def _result(method: str, budget: float, density: float, one: Any, grid: CausalGrid) -> dict[str, Any]:
    loss, sparse = (float(np.asarray(x[0], np.float64).sum() / (grid.length - 1)) for x in (one.loss, one.other_loss))
    return {
        "method": method,
        "budget": budget,
        "density": round(density, 6),
        "kl": float(f"{np.asarray(one.divergence[0], np.float64).mean():.6g}"),
        "loss": round(sparse, 6),
        "perplexity_gap": float(f"{math.expm1(sparse - loss):.6g}"),
        "same_token": round(float(np.asarray(one.same[0]).mean()), 6),
    }


def _round(values: np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]
