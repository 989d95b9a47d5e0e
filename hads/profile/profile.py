"""HadsProfile: what calibration learned of a model's heads."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

import jax
import numpy as np

from xsake.hads.profile.estimator import BUCKETS, KINDS, Estimator

_HEADS = ("features", "tokens", "distance", "sink", "sensitivity", "burstiness", "entropy", "distance_mass")
_TABLES = ("free_shares", "layer_shares", "head_shares", "log_thresholds")
_STATIC = ("model", "block", "length", "kv_heads", "digests")


@partial(jax.tree_util.register_dataclass, data_fields=_HEADS + _TABLES, meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HadsProfile:
    """A model's heads as HADS needs to know them; make one with `calibrate`, keep it with `save` and `load`.

    For each of L layers and H query heads (float32):
      features, tokens, distance, sink: the weights of the estimate of block mass (`selection.pooled`).
      sensitivity: what a squared unit of dropped mass costs the model, relative to the other heads of all layers.
      burstiness: what a block's own part of that cost counts beyond its products with other blocks' (`selection.gain`).
      entropy: of a query's weights over the logarithm of the keys that it sees.
      distance_mass: mean mass of a block by bucket of distance.

    Tables over budgets, counted as shares of the blocks that are not forced, so that they hold at any length:
      free_shares [X]: the budgets of the table.
      layer_shares [X, L], head_shares [X, L, H]: what each layer and head gets of its own free blocks.
      log_thresholds [X]: the gain at which a budget cuts, for the elastic mode.

    `model` names the model, `block` is the block size, `length` that of the sequences it was calibrated on, and
    `digests` what they were, so that nobody evaluates on them. Other lengths work: nothing in a profile depends on the
    length except the distances that were seen, and a distance beyond them is taken for the farthest one seen.
    """

    features: Any
    tokens: Any
    distance: Any
    sink: Any
    sensitivity: Any
    burstiness: Any
    entropy: Any
    distance_mass: Any
    free_shares: Any
    layer_shares: Any
    head_shares: Any
    log_thresholds: Any
    model: str
    block: int
    length: int
    kv_heads: int
    digests: tuple[str, ...]

    @property
    def layers(self) -> int:
        return self.sink.shape[0]

    @property
    def q_heads(self) -> int:
        return self.sink.shape[1]

    @property
    def head_dim(self) -> int:
        return 2 * self.features.shape[-1]

    def estimator(self, layer: Any) -> Estimator:
        """One layer's weights."""
        return Estimator(self.features[layer], self.tokens[layer], self.distance[layer], self.sink[layer])

    def check(self) -> None:
        """Raise ValueError if shapes or values cannot be a profile's."""
        lead = np.shape(self.sink)
        if len(lead) != 2 or 0 in lead:
            raise ValueError(f"sink must be [layers, heads], got shape {lead}")
        points = np.shape(self.free_shares)
        wanted: dict[str, tuple] = {name: lead for name in _HEADS}
        wanted["features"] = (*lead, len(KINDS), self.features.shape[-1])
        wanted["distance"] = wanted["distance_mass"] = (*lead, len(BUCKETS))
        wanted |= {"free_shares": points, "log_thresholds": points}
        wanted |= {"layer_shares": (*points, lead[0]), "head_shares": (*points, *lead)}
        for name, shape in wanted.items():
            value = np.asarray(getattr(self, name))
            if value.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
            if not np.isfinite(value).all():
                raise ValueError(f"{name} has values that are not finite")
        if (np.asarray(self.sensitivity) <= 0).any() or (np.asarray(self.burstiness) < 0).any():
            raise ValueError("sensitivity must be above 0 and burstiness not below")
        if len(points) != 1 or (np.diff(np.asarray(self.free_shares)) <= 0).any():
            raise ValueError("free_shares must rise")
        if lead[1] % self.kv_heads:
            raise ValueError(f"{lead[1]} query heads are not a multiple of kv_heads={self.kv_heads}")

    def save(self, path: str | os.PathLike) -> None:
        """Write one JSON file, a line for each head, atomically."""
        from xsake.hads.profile import file

        file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> HadsProfile:
        """Read a file that `save` wrote."""
        from xsake.hads.profile import file

        return file.load(path)

    def __repr__(self) -> str:
        return (
            f"HadsProfile({self.model!r}, {self.layers} layers, {self.q_heads} query heads on {self.kv_heads}, "
            f"head_dim {self.head_dim}, blocks of {self.block}, calibrated on {len(self.digests)} x {self.length} "
            "tokens)"
        )
