"""Attention: the function that a user's model calls in every layer, for whatever it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

import xsake
from xsake._ground.buckets import density_bucket
from xsake._ground.device import device_kind, platform_of
from xsake.hads.attention.policy import ALWAYS, AUTO, Decision, Kind, Policy, Situation, default_dtype
from xsake.hads.attention.step import NEW_TOKENS, Step, forced_share_of_step
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.by_length import forced_share, kept_by_length
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.chunk import LayerWeights, select_chunk
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.rules import Rules
from xsake.hads.selection.select import check_heads, select

# Arguments of `xsake.attention` that change nothing in the choice of blocks.
_PASSED = ("bias", "sinks", "logits_soft_cap", "return_lse", "deterministic", "implementation")


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """Causal attention to the blocks that HADS chooses: `attention(query, key, value, layer=number)`.

    A model that calls it in every layer reads prompts, whole or in chunks, trains, and writes, sparsely wherever that
    pays (`policy`). Query, key and value are those of `xsake.attention`, rotary positions applied, and so are the rules
    `is_causal` (True, if it is left out), `local_window_size`, `scale`, `sinks`, `bias` and `logits_soft_cap`.

    Args:
      profile: of this model, from `hads.calibrate`.
      budget: the share of the causal blocks that prompts and training keep.
      decode: the share of the cache's blocks that new tokens attend to; None for all blocks.
      policy: "auto" runs sparsely where it is faster and keeps more blocks where few would harm the answer
        (`hads.explain` says what a call does); "always" runs sparsely wherever there is a block to leave out; or a
        `hads.Policy`.
    """

    profile: HadsProfile
    budget: float
    decode: float | None = None
    policy: Literal["auto", "always"] | Policy = "auto"

    def __post_init__(self) -> None:
        check_options(self.budget, self.decode, self.policy)

    @property
    def policy_in_force(self) -> Policy:
        return self.policy if isinstance(self.policy, Policy) else {"auto": AUTO, "always": ALWAYS}[self.policy]

    def __call__(
        self,
        query: Float[Array, "B T H D"],
        key: Float[Array, "B S K D"],
        value: Float[Array, "B S K Dv"],
        *,
        layer: Any,
        start: int | None = None,
        lengths: Int[Array | np.ndarray, "B"] | None = None,
        left_padding: Int[Array | np.ndarray, "B"] | None = None,
        segment_ids: Any = None,
        positions: Any = None,
        pooled: PooledKeys | None = None,
        **rules: Any,
    ) -> Any:
        """Attention [B, T, H, Dv] of one layer.

        What a call does follows from its arguments:

        - As many queries as keys: a whole sequence, which gradients may be taken of. `segment_ids` are those of
          documents that are packed into it; `lengths` [B] and `left_padding` [B] say how much of it is text: from
          `left_padding` on, up to `lengths`.
        - `start`, an int: a chunk of a prompt; the queries are tokens from `start` on, the keys a cache of all tokens
          up to the chunk's end, or of more slots. The counts of the chunks sum to those of the whole prompt.
        - Fewer queries than keys, and `lengths`: new tokens; the queries are the last of each sequence's `lengths`
          tokens, the keys a cache in whose slot n token n lies. Up to 8 of them are written sparsely if there is a
          budget for it. A pair of `positions`, of queries and keys, says the same.

        Args:
          layer: its number, which may be traced where the model scans over its layers.
          pooled: the cache's keys pooled (`PooledKeys`), where the model keeps them; else they are pooled here.

        Raises ValueError for other heads or another window than the profile's, and NotImplementedError for rules that
        HADS does not know, such as dropout of attention weights.
        """
        passed = {name: rules.pop(name) for name in _PASSED if rules.get(name) is not None}
        known = Rules.of({name: x for name, x in rules.items() if name not in _PASSED})
        _check_number(layer)
        alone = self.profile.row(layer) is None
        check_heads(query, key, self.profile, None if alone else layer)
        if not alone:
            self._check_window(known, key.shape[1])
        call = _Call(self, layer, known, passed, left_padding)
        tokens, slots = query.shape[1], key.shape[1]
        for name, given in (("lengths", lengths), ("left_padding", left_padding)):
            _check_per_sequence(name, given, len(query), slots)
        if positions is not None:
            if not isinstance(positions, tuple):
                raise NotImplementedError("positions of a whole sequence: HADS takes tokens in their order")
            return call.new_tokens(query, key, value, positions[0][:, -1] + 1, pooled, positions)
        if start is not None:
            if segment_ids is not None:
                raise NotImplementedError("segment_ids with start: a chunk is of one document per sequence")
            return call.chunk(query, key, value, _constant(start, tokens, slots), lengths, pooled)
        if tokens == slots:
            return call.sequence(query, key, value, lengths, segment_ids)
        if lengths is None or tokens > slots:
            raise ValueError(
                f"{tokens} queries and {slots} keys: say where the queries are, by start= (a chunk of a prompt) or by "
                "lengths= (the last tokens of sequences in a cache)"
            )
        ends = jnp.asarray(lengths, jnp.int32)
        places = (ends - tokens)[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        there = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], (len(key), slots))
        return call.new_tokens(query, key, value, ends, pooled, (places, there))

    def decide(
        self,
        kind: Kind,
        *,
        batch: int,
        queries: int,
        keys: int,
        device: str,
        dtype: str,
        layer: Any = None,
        bias: bool = False,
        left_padding: bool = False,
    ) -> Decision:
        """What such a call runs, and why. No other place decides."""
        if isinstance(layer, int | np.integer) and not 0 <= layer < self.profile.model_layers:
            self.profile.check_layer(layer)
        if layer is not None and self.profile.row(layer) is None:
            return Decision(None, "this layer has a window, and others have none")
        if left_padding and kind in ("chunk", "decode"):
            return Decision(None, "with padding before the texts, the cache's blocks are not those of the texts")
        if left_padding and bias:
            return Decision(None, "a bias belongs to places, from which texts with padding before them are moved")
        budget, forced = self.budget, forced_share(self.profile.grid(keys))
        if kind == "decode":
            if self.decode is None:
                return Decision(None, "there is no budget for new tokens: Attention(profile, budget, decode=0.1)")
            if queries > NEW_TOKENS:
                return Decision(None, f"{queries} new tokens are more than the {NEW_TOKENS} that share their blocks")
            budget, forced = self.decode, forced_share_of_step(self.profile, keys, queries)
        situation = Situation(kind, batch, queries, keys, budget, forced, device, dtype, self.profile)
        decision = self.policy_in_force.decide(situation)
        if kind != "decode" or decision.budget is None:
            return decision
        if decision.budget == 1:
            return Decision(None, "all blocks are kept")
        shortest = Step.of(self.profile, decision.budget, queries, keys).shortest
        return decision._replace(why=f"{decision.why}; densely while a sequence has {shortest} tokens or fewer")

    def _check_window(self, rules: Rules, length: int) -> None:
        ours, its = rules.window, self.profile.window
        if ours != its and min(ours or length, its or length) < length:
            said = ["no window" if x is None else f"a window of {x} tokens" for x in (ours, its)]
            raise ValueError(
                f"this call of attention has {said[0]}, and the profile of {self.profile.model!r} was made for "
                f"{said[1]}, which matters at {length} tokens: calibrate this model"
            )


def check_options(budget: Any, decode: Any, policy: Any) -> None:
    """Raise ValueError if an `Attention` cannot have these."""
    for name, share in (("budget", budget), ("decode", decode)):
        if share is None and name == "decode":
            continue
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"{name}={share!r} must be a share of the blocks, above 0 and at most 1")
    if not isinstance(policy, Policy) and policy not in ("auto", "always"):
        raise ValueError(f'policy={policy!r} must be "auto", "always" or a hads.Policy')


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One call: its layer, which HADS may leave alone, its rules, and the arguments that are passed on to
    `xsake.attention`."""

    own: Attention
    layer: Any
    rules: Rules
    passed: dict[str, Any]
    left_padding: Any

    def sequence(self, query: Array, key: Array, value: Array, lengths: Any, segment_ids: Any) -> Any:
        arrays = {"query": query, "key": key, "value": value, "layer": self.layer}
        arrays["segment_ids"] = _of_sequence(segment_ids)
        if padded := lengths is not None or self.left_padding is not None:
            batch, tokens = query.shape[:2]
            before = 0 if self.left_padding is None else self.left_padding
            ends = tokens if lengths is None else lengths
            arrays |= {name: _spread(x, batch) for name, x in (("left_padding", before), ("lengths", ends))}
        static = {name: x for name, x in self.passed.items() if name not in ("bias", "sinks")}
        arrays |= {name: x for name, x in self.passed.items() if name in ("bias", "sinks")}
        number = None if isinstance(self.layer, jax.Array) else int(arrays.pop("layer"))
        moved = padded and self.left_padding is not None
        return _sequence(_Run(self.own, number, self.rules, tuple(static.items()), padded, moved), arrays)

    def padded_prompt(
        self, query: Array, key: Array, value: Array, before: Array, ends: Array, segments: Array, budget: float
    ) -> Any:
        """Sequences of different lengths. Padding before a text is moved behind it while blocks are chosen."""
        if self.left_padding is not None:
            query, key, value, segments = (_rolled(x, -before) for x in (query, key, value, segments))
        mask = self._chosen(query, key, 0, ends - before, None, budget)
        out = self._attend(query, key, value, mask, segment_ids=segments, **self.rules.arguments())
        return out if self.left_padding is None else jax.tree.map(lambda x: _rolled(x, before), out)

    def chunk(self, query: Array, key: Array, value: Array, start: int, lengths: Any, pooled: PooledKeys | None) -> Any:
        end = start + query.shape[1]
        decision = self._decide("chunk" if start or self.left_padding is not None else "prompt", query, end)
        options = self._of_chunk(query, key[:, :end].shape, start)
        if decision.budget is None:
            padding = self._padding(query.shape[1], end)
            return self._attend(query, key[:, :end], value[:, :end], **options, **padding)
        window = self.own.profile.window
        windowed = window is not None and window < end
        if windowed:  # by positions: xsake would compute what is past the end, too
            key, value = key[:, :end], value[:, :end]
        elif self.rules.scale is not None:
            options = {"scale": self.rules.scale}
        else:
            options = {}
        mask = self._chosen(query, key, start, lengths, pooled, decision.budget)
        return self._attend(query, key, value, mask, **options)

    def new_tokens(
        self,
        query: Array,
        key: Array,
        value: Array,
        lengths: Array,
        pooled: PooledKeys | None,
        positions: tuple[Array, Array],
    ) -> Any:
        options = {"positions": positions, **self.rules.arguments()}
        dense = partial(self._attend, query, key, value, **options, **self._padding(query.shape[1], key.shape[1]))
        decision = self._decide("decode", query, key.shape[1])
        if decision.budget is None:
            return dense()
        step = Step.of(self.own.profile, decision.budget, query.shape[1], key.shape[1])
        # XLA alone would cut the whole cache into tiles before it takes the blocks that a mask lists.
        listed = platform_of(query) == "gpu" or self.passed
        by_mask = partial(self._attend, query, key, value, **options) if listed else None
        given = self.rules.scaled(query), key, value, self._weights(), lengths, pooled
        return jax.lax.cond(jnp.min(lengths) > step.shortest, lambda: step.attend(*given, by_mask), dense)

    def _decide(self, kind: Kind, query: Array, keys: int) -> Decision:
        asked = dict(layer=self.layer, bias="bias" in self.passed, left_padding=self.left_padding is not None)
        return self.own.decide(kind, **_sizes(query, keys), **asked)

    def _attend(self, query: Array, key: Array, value: Array, mask: Any = None, **options: Any) -> Any:
        return xsake.attention(query, key, value, mask, **options, **self.passed)

    def _padding(self, tokens: int, keys: int) -> dict[str, Any]:
        """The rule that padding before the texts of a cache is not seen."""
        if self.left_padding is None:
            return {}
        before = jnp.asarray(self.left_padding, jnp.int32)[:, None]
        of_keys = jnp.where(jnp.arange(keys, dtype=jnp.int32)[None] < before, -1, 0)
        return {"segment_ids": (jnp.zeros((len(before), tokens), jnp.int32), of_keys)}

    def _of_chunk(self, query: Array, keys: tuple[int, ...], start: int) -> dict[str, Any]:
        """Dense attention's arguments for queries that begin at token `start` of the keys."""
        if start == 0:
            return self.rules.arguments()
        scale = {} if self.rules.scale is None else {"scale": self.rules.scale}
        if self.rules.window is None:
            return {"local_window_size": (None, start)} | scale
        places = jnp.broadcast_to(jnp.arange(keys[1], dtype=jnp.int32)[None], keys[:2])
        return self.rules.arguments() | {"positions": (places[:, start:], places)}

    def _chosen(
        self, query: Array, key: Array, start: int, lengths: Any, pooled: PooledKeys | None, budget: float
    ) -> xsake.BlockMask:
        profile, end = self.own.profile, start + query.shape[1]
        ends = jnp.full(len(query), end, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
        if pooled is None:
            sizes = dict(batch=len(key), kv_heads=key.shape[2], head_dim=key.shape[3])
            pooled = PooledKeys.empty(blocks=-(-end // profile.block), **sizes)
            pooled = pooled.write(key[:, :end], ends, start=0, block=profile.block)
        kept, there = (jnp.asarray(x) for x in kept_by_length(profile, budget, self.own.policy_in_force.spare, end))
        first, last = (-(-jnp.minimum(ends, at) // profile.block) for at in (start, end))
        row = profile.row(self.layer)
        counts = jnp.minimum(kept[last, row] - kept[first, row], there[last] - there[first])
        return select_chunk(
            self.rules.scaled(query),
            key,
            pooled,
            self._weights(),
            counts,
            ends,
            start=start,
            block=profile.block,
            block_q=profile.block_q,
            rule=profile.rule,
            density_hint=density_bucket(budget),
            window=profile.window,
        )

    def _weights(self) -> LayerWeights:
        profile = self.own.profile
        if isinstance(self.layer, jax.Array):
            return LayerWeights(*profile.on_device().weights(self.layer))
        return LayerWeights.of(profile, int(self.layer))


@dataclasses.dataclass(frozen=True)
class _Run:
    """The static part of a whole sequence's attention."""

    own: Attention
    layer: int | None
    rules: Rules
    static: tuple[tuple[str, Any], ...]
    padded: bool = False
    moved: bool = False  # there is padding before the texts

    def __call__(self, kind: Kind, arrays: Mapping[str, Any]) -> Any:
        given = dict(arrays)
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        layer, segments = given.pop("layer", self.layer), given.pop("segment_ids")
        own, length = self.own, query.shape[1]
        asked: dict[str, Any] = dict(layer=layer, bias="bias" in given, left_padding=self.moved)
        decision, mask = own.decide(kind, **_sizes(query, length), **asked), None
        if self.padded:
            before, ends = given.pop("left_padding"), given.pop("lengths")
            place = jnp.arange(length, dtype=jnp.int32)[None]
            text = (place >= before[:, None]) & (place < ends[:, None])
            segments = jnp.where(text, 0 if segments is None else segments, -1).astype(jnp.int32)
            if decision.budget is not None and kind == "prompt":
                call = _Call(own, layer, self.rules, given | dict(self.static), before if self.moved else None)
                return call.padded_prompt(query, key, value, before, ends, segments, decision.budget)
        if decision.budget is not None:
            profile: HadsProfile = own.profile
            budget: float | Array = decision.budget
            options: dict[str, Any] = dict(transpose=kind == "training", density_hint=decision.budget)
            if segments is not None:  # each document has a count of its own, and padding is one more document
                budget = own.budget
                options |= dict(segment_ids=segments, spare=own.policy_in_force.spare)
            elif self.layer is None:  # traced: the counts of all layers, of which the program takes one
                budget = jnp.asarray(layer_counts(profile, decision.budget, length), jnp.int32)
                profile = profile.on_device()
            mask = select(self.rules.scaled(query), key, profile, budget, layer=layer, **options)
        rules = self.rules.arguments() | dict(self.static)
        return xsake.attention(query, key, value, mask, segment_ids=segments, **rules, **given)


# Lists for the gradients are made only where gradients are taken.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sequence(run: _Run, arrays: dict[str, Any]) -> Any:
    return run("prompt", arrays)


def _forward(run: _Run, arrays: dict[str, Any]) -> tuple[Any, Callable]:
    return jax.vjp(partial(run, "training"), arrays)


_sequence.defvjp(_forward, lambda run, pull, gradient: pull(gradient))


def explain(
    attention: Attention,
    *,
    queries: int,
    keys: int | None = None,
    batch: int = 1,
    training: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    layer: int | None = None,
    bias: bool = False,
    left_padding: bool = False,
) -> Decision:
    """What `attention` runs for so many queries and keys in each of `batch` sequences, and why.

    As many queries as keys are a whole prompt or, with `training`, a training step; up to 8 queries of more keys are
    new tokens; others are a chunk. It is the decision that such a call takes.

    Args:
      device: its kind, as `jax.devices()[0].device_kind` names it; by default this device.
      dtype: of the queries; by default float32 on a CPU and bfloat16 elsewhere.
      layer: its number, where some layers have a window and others none.
      bias, left_padding: whether the call has them.

    >>> from xsake.hads import Attention, HadsProfile, explain
    >>> attention = Attention(HadsProfile.shipped("smollm2", 8192), 0.2, policy="always")
    >>> print(explain(attention, queries=8192))
    20.0% of the blocks: always
    >>> explain(attention, queries=1, keys=8192).budget is None
    True
    """
    keys = queries if keys is None else keys
    if queries > keys or queries < 1:
        raise ValueError(f"{queries=} must be at least 1, and at most the {keys} keys")
    if training and queries < keys:
        raise ValueError(f"training=True is of whole sequences: got {queries} queries and {keys} keys")
    kind: Kind = "training" if training else "prompt"
    if queries < keys:
        kind = "decode" if queries <= NEW_TOKENS else "chunk"
    device = device or jax.local_devices()[0].device_kind
    sizes: dict[str, Any] = dict(batch=batch, queries=queries, keys=keys, device=device)
    asked: dict[str, Any] = dict(layer=layer, bias=bias, left_padding=left_padding)
    return attention.decide(kind, **sizes, dtype=dtype or default_dtype(device), **asked)


def _sizes(query: Array, keys: int) -> dict[str, Any]:
    batch, queries = query.shape[:2]
    return dict(batch=batch, queries=queries, keys=keys, device=device_kind(query), dtype=query.dtype.name)


def _constant(start: Any, tokens: int, slots: int) -> int:
    if isinstance(start, bool) or not isinstance(start, int | np.integer):
        raise TypeError(
            f"start={start!r} must be an int that is known when the program is compiled: the size of a chunk's lists is"
        )
    if start < 0 or start + tokens > slots:
        raise ValueError(f"{tokens} queries from token {start} on need {start + tokens} keys; got {slots}")
    return int(start)


def _check_number(layer: Any) -> None:
    whole = isinstance(layer, int | np.integer) and not isinstance(layer, bool)
    if not whole and not (hasattr(layer, "dtype") and jnp.issubdtype(layer.dtype, jnp.integer) and layer.ndim == 0):
        raise TypeError(f"layer={layer!r} must be the layer's number: an int, or a traced integer in a scan")


def _check_per_sequence(name: str, given: Any, batch: int, most: int) -> None:
    """Raise ValueError unless there is one int per sequence; a traced one is not looked at."""
    if given is None:
        return
    given = given if hasattr(given, "dtype") else np.asarray(given)
    if given.shape != (batch,) or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"{name} of {given.dtype}{given.shape} must be integers [{batch}], one per sequence")
    if isinstance(given, np.ndarray) and not ((given >= 0) & (given <= most)).all():
        raise ValueError(f"{name}={given.tolist()} must be from 0 to {most}, the number of keys")


def _of_sequence(segment_ids: Any) -> Any:
    """The segments of queries and keys, which are the same tokens."""
    if not isinstance(segment_ids, tuple):
        return segment_ids
    first, second = segment_ids
    if first is not second:
        raise ValueError("segment_ids of queries and of keys: they are the same tokens here, so give one array [B, T]")
    return first


def _spread(x: Any, batch: int) -> Array:
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch,))


def _rolled(x: Array, by: Array) -> Array:
    """Each sequence's tokens, moved by so many places."""
    return jax.vmap(lambda x, by: jnp.roll(x, by, 0))(x, by)
