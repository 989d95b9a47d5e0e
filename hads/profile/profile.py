"""HadsProfile: what calibration learned of a model's heads."""

from __future__ import annotations

import dataclasses
import os
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake._ground import fields
from xsake._ground.kinds import TEXT, maybe, whole
from xsake.hads.mask.band import NO_LIMIT
from xsake.hads.profile import file, find, fingerprint
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS, KINDS, Estimator
from xsake.hads.profile.rule import RULE, Rule

# Budgets of a profile's tables, as shares of the blocks that are not forced.
FREE_SHARES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8], np.float32)
_FINGERPRINTS = fields.Kind(
    lambda value: isinstance(value, tuple) and all(map(TEXT.allows, value)), "a tuple of fingerprints"
)

_LAYERS = fields.Kind(
    lambda value: isinstance(value, tuple) and all(map(whole(0).allows, value)), "a tuple of numbers of layers"
)


def _array(*axes: str, above: float | None = None, least: float | None = None) -> Any:
    """Declare a float32 array of a profile: its axes, and a bound that its values must exceed or (`least`) reach."""
    return dataclasses.field(metadata={"axes": axes, "above": above, "least": least})


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HadsProfile:
    """What HADS needs to know of a model's heads. Make a profile with `calibrate`, keep it with `save` and `load`.

    For each of L layers and H query heads (float32):

    - `features`, `tokens`, `distance`, `sink`: the weights of the estimate of block mass (`selection.pooled`).
    - `sensitivity`: what a squared unit of dropped mass costs the model; 1 on average over all heads of all layers.
    - `burstiness`: how unevenly a block's queries attend to it: the variance of its mass among its queries over the
      mass, times `Rule.own_part` (φ in `selection.gain`).

    Tables over budgets, counted as shares of the blocks that are not forced, so that they hold at any length:

    - `free_shares` [X]: the budgets of the table.
    - `layer_shares` [X, L], `head_shares` [X, L, H]: the share of its own free blocks that each layer and head gets.
    - `log_thresholds` [X]: logarithm of the smallest gain that is kept, for the elastic mode.

    And what it was made from and for:

    - `model`: the model's name.
    - `block`: tokens of a block of keys.
    - `block_q`: tokens of a row of blocks, a multiple of `block`.
    - `length`: tokens per sequence of calibration. Other lengths are served too: only distances depend on the length,
      and a distance beyond those of calibration counts as the farthest one seen.
    - `kv_heads`: number of KV heads.
    - `digests`: fingerprints of the sequences of calibration, so that nobody evaluates on them or on parts of them.
    - `rule`: the constants that the profile was made with and is used with.
    - `window`: tokens that a token of this model sees, itself among them; None for all. Blocks outside the window are
      never chosen, and budgets are shares of the blocks inside.
    - `windowed`: the model's layers with a window, where other layers have none. HADS leaves them alone: arrays and
      budgets are of the other layers, and L counts these.

    The fields below are the only list of a profile's contents: shapes, files and checks are derived from them.
    """

    features: Any = _array("layers", "heads", "kinds", "pairs")
    tokens: Any = _array("layers", "heads")
    distance: Any = _array("layers", "heads", "buckets")
    sink: Any = _array("layers", "heads")
    sensitivity: Any = _array("layers", "heads", above=0.0)
    burstiness: Any = _array("layers", "heads", least=0.0)
    free_shares: Any = _array("budgets")
    layer_shares: Any = _array("budgets", "layers")
    head_shares: Any = _array("budgets", "layers", "heads")
    log_thresholds: Any = _array("budgets")
    model: str = fields.field(TEXT)
    block: int = fields.field(whole(most=NO_LIMIT))
    block_q: int = fields.field(whole(most=NO_LIMIT))
    length: int = fields.field(whole(most=NO_LIMIT))
    kv_heads: int = fields.field(whole())
    digests: tuple[str, ...] = fields.field(_FINGERPRINTS)
    rule: Rule = fields.field(fields.Kind(lambda value: isinstance(value, Rule), "a Rule"))
    window: int | None = fields.field(maybe(whole()), default=None)
    windowed: tuple[int, ...] = fields.field(_LAYERS, default=())

    @property
    def layers(self) -> int:
        return self.sink.shape[0]

    @property
    def model_layers(self) -> int:
        """All layers of the model, with those that HADS leaves alone."""
        return self.layers + len(self.windowed)

    def row(self, layer: Any) -> Any:
        """The place of a model's layer in the profile's arrays; None if HADS leaves it alone.

        A traced number can only be that of a model without such layers.
        """
        if not self.windowed:
            return layer
        if isinstance(layer, jax.Array):
            raise TypeError("layer must be an int for a model in which only some layers have a window")
        number = int(layer)
        return None if number in self.windowed else number - sum(other < number for other in self.windowed)

    @property
    def q_heads(self) -> int:
        return self.sink.shape[1]

    @property
    def head_dim(self) -> int:
        return 2 * self.features.shape[-1]

    def grid(self, length: int) -> CausalGrid:
        """The blocks of a sequence, chosen from by this profile's rule."""
        return CausalGrid(length, self.block, self.rule, self.window, self.block_q)

    def in_blocks(self, block: int, block_q: int | None = None) -> HadsProfile:
        """The profile for other blocks, by the rule of such blocks: what it knows of the heads is of tokens.

        >>> HadsProfile.shipped("smollm2").in_blocks(32, block_q=128)  # doctest: +ELLIPSIS
        HadsProfile('smollm2', 30 layers, 9 query heads on 3, head_dim 64, blocks of 128 x 32, ...)
        """
        block_q = block_q or block
        found = dataclasses.replace(self, block=block, block_q=block_q)
        found.check()
        forced = Rule.of_blocks(block_q // block)
        rule = dataclasses.replace(self.rule, near_blocks=forced.near_blocks, dense_rows=forced.dense_rows)
        return dataclasses.replace(found, rule=rule)

    def on_device(self) -> HadsProfile:
        """The profile as JAX arrays, without digests: digests are static, and would compile a program per profile."""
        return jax.tree.map(jnp.asarray, dataclasses.replace(self, digests=()))

    def estimator(self, layer: Any) -> Estimator:
        """One layer's weights."""
        layer = self.row(layer)
        return Estimator(self.features[layer], self.tokens[layer], self.distance[layer], self.sink[layer])

    def weights(self, layer: Any) -> tuple[Estimator, Any, Any]:
        """One layer's estimator, sensitivity and burstiness."""
        row = self.row(layer)
        return self.estimator(layer), self.sensitivity[row], self.burstiness[row]

    def check_layer(self, layer: int | np.integer) -> None:
        """Raise ValueError if the model has no such layer, or if HADS leaves it alone."""
        if not 0 <= layer < self.model_layers:
            raise ValueError(f"{layer=} must be an int from 0 to {self.model_layers - 1}, the profile's layers")
        if self.row(layer) is None:
            raise ValueError(f"{layer=} has a window, and other layers have none: HADS leaves it alone")

    def check(self) -> None:
        """Raise ValueError if shapes or values cannot be a profile's."""
        for name, kind in _KINDS.items():
            fields.check(name, getattr(self, name), kind)
        fingerprint.check(self.digests)
        if list(self.windowed) != sorted({n for n in self.windowed if n < self.model_layers}):
            raise ValueError(f"windowed={self.windowed} must be layers of the model, in order")
        if self.block_q % self.block:
            raise ValueError(f"block_q={self.block_q} must be a multiple of block={self.block}")
        for name, axes in (("sink", 2), ("features", 4), ("free_shares", 1)):
            shape = np.shape(getattr(self, name))
            if len(shape) != axes or 0 in shape:
                raise ValueError(f"{name} must be [{', '.join(ARRAYS[name]['axes'])}], got shape {shape}")
        wanted = shapes(layers=self.layers, heads=self.q_heads, pairs=self.head_dim // 2, budgets=len(self.free_shares))
        for name, field in ARRAYS.items():
            value = np.asarray(getattr(self, name))
            if value.shape != wanted[name]:
                raise ValueError(f"{name} must have shape {wanted[name]}, got {value.shape}")
            if not np.isfinite(value).all():
                raise ValueError(f"{name} has values that are not finite")
            if field["above"] is not None and (value <= field["above"]).any():
                raise ValueError(f"{name} must be above {field['above']:g}, got {value.min()}")
            if field["least"] is not None and (value < field["least"]).any():
                raise ValueError(f"{name} must be at least {field['least']:g}, got {value.min()}")
        if (np.diff(np.asarray(self.free_shares)) <= 0).any():
            raise ValueError("free_shares must rise")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are not a multiple of kv_heads={self.kv_heads}")

    def save(self, path: str | os.PathLike) -> None:
        """Write one JSON file, a line for each head, atomically."""
        file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> HadsProfile:
        """Read a file that `save` wrote."""
        try:
            return file.load(cls, path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{os.fspath(path)} does not exist; HadsProfile.shipped(model, length) gives the profiles that come "
                f"with xsake, of {', '.join(_shipped())}"
            ) from error

    @classmethod
    def shipped(cls, model: str, length: int = 0) -> HadsProfile:
        """The profile of a published model that comes with xsake, from sequences about as long as `length` tokens.

        >>> HadsProfile.shipped("smollm2", 6000).length
        8192
        """
        with resources.as_file(shipped_file(model, length)) as path:
            return cls.load(path)

    @classmethod
    def find(cls, model: Any, length: int = 0) -> HadsProfile | None:
        """A model's profile from sequences about as long as `length` tokens, or None: the one that `keep` wrote, or the
        one that comes with xsake. `model` is a pytree of its weights, as whole as they were when it was kept."""
        return find.find(cls, find.key_of(model), length)

    def keep(self, model: Any) -> Path:
        """Keep the profile in the user's cache, where `find` finds it by the model's weights; the file."""
        path = find.kept(find.key_of(model), self.length, f"{self.block_q}x{self.block}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save(path)
        return path

    def __repr__(self) -> str:
        blocks = f"{self.block}" if self.block_q == self.block else f"{self.block_q} x {self.block}"
        layers = f"{self.layers} layers" + (f" of {self.model_layers}" if self.windowed else "")
        lacks = "" if self.rule.exact_queries else ", no exact rows"
        return (
            f"HadsProfile({self.model!r}, {layers}, {self.q_heads} query heads on {self.kv_heads}, "
            f"head_dim {self.head_dim}, blocks of {blocks}, calibrated on {len(self.digests)} x {self.length} "
            f"tokens{lacks})"
        )


def shipped_file(model: str, length: int = 0) -> Any:
    """The file of `HadsProfile.shipped`."""
    found = _shipped()
    if model not in found:
        names = ", ".join(found)
        raise FileNotFoundError(f"no profile of {model!r} comes with xsake, only of {names}: make one, xsake calibrate")
    by_length = found[model]
    return by_length[min(by_length, key=lambda tokens: find.apart(tokens, length))]


def _shipped() -> dict[str, dict[int, Any]]:
    """The files MODEL-TOKENS.json of the folder `shipped`: by model, and by the tokens of a sequence of calibration."""
    found: dict[str, dict[int, Any]] = {}
    for path in sorted((resources.files(__package__) / "shipped").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            model, _, tokens = path.name.removesuffix(".json").rpartition("-")
            found.setdefault(model, {})[int(tokens)] = path
    return found


# What `_array` declared, by name, and the kinds of the other fields.
ARRAYS = {f.name: f.metadata for f in dataclasses.fields(HadsProfile) if "axes" in f.metadata}
_KINDS = {f.name: f.metadata["kind"] for f in dataclasses.fields(HadsProfile) if f.name not in ARRAYS}
STATIC = tuple(_KINDS)
jax.tree_util.register_dataclass(HadsProfile, data_fields=tuple(ARRAYS), meta_fields=STATIC)


def shapes(*, layers: int, heads: int, pairs: int, budgets: int) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a profile."""
    sizes = dict(layers=layers, heads=heads, pairs=pairs, budgets=budgets, kinds=len(KINDS), buckets=len(BUCKETS))
    return {name: tuple(sizes[axis] for axis in field["axes"]) for name, field in ARRAYS.items()}


def profile_shape(
    *,
    layers: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    model: str,
    block: int,
    length: int,
    block_q: int | None = None,
    rule: Rule = RULE,
) -> HadsProfile:
    """A profile with shapes in place of arrays, for programs that are compiled ahead of calibration.

    The shape has no digests: give the compiled program a profile without digests.
    """
    wanted = shapes(layers=layers, heads=q_heads, pairs=head_dim // 2, budgets=len(FREE_SHARES))
    arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in wanted.items()}
    about: dict[str, Any] = dict(model=model, block=block, block_q=block_q or block, length=length, kv_heads=kv_heads)
    return HadsProfile(**arrays, **about, digests=(), rule=rule)
