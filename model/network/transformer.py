"""A decoder-only transformer whose attention is block-sparse wherever a mask says so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

import xsake
from xsake.model.network.attend import Attend, MaskFn
from xsake.model.network.cache import KVCache
from xsake.model.network.config import ModelConfig
from xsake.model.network.linear import Linear
from xsake.model.network.rope import Rotations, rotations
from xsake.model.network.sequence_cut import SequenceCut

if TYPE_CHECKING:
    from xsake.hads import Layered

Tokens = Int[Array | np.ndarray, "B T"]
States = Float[Array, "B T width"]
AttendLayer = Callable[[Array, Array, Array], tuple[Array, Any]]  # (output, what the layer keeps, such as a cache)


class RMSNorm(nnx.Module):
    def __init__(self, width: int, *, eps: float, dtype: Any, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*lead width"]) -> Float[Array, "*lead width"]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        scale = jax.lax.broadcast_to_rank(self.scale[...].astype(jnp.float32), x.ndim)
        return (wide * scale).astype(self.dtype)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, linear: Callable[..., Linear], norm: Callable[[int], RMSNorm]):
        self.head_dim = config.head_dim
        self.rotary = config.rotary_of(layer)
        self.query_factor = 1.0 if config.scale_dim is None else math.sqrt(config.head_dim / config.scale_dim)
        self.has_norms = config.qk_norm
        biased = partial(linear, config.width, use_bias=config.qkv_bias)
        self.query = biased(config.q_heads * config.head_dim)
        self.key = biased(config.kv_heads * config.head_dim)
        self.value = biased(config.kv_heads * config.head_dim)
        if config.qk_norm:
            self.query_norm, self.key_norm = norm(config.head_dim), norm(config.head_dim)
        self.output = linear(config.q_heads * config.head_dim, config.width, kernel_init=_residual_init(config))

    def __call__(self, x: States, rotations: Rotations, attend: AttendLayer) -> tuple[States, Any]:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        if self.has_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.query_factor != 1:
            query = query * self.query_factor
        if self.rotary is not None:
            turn = rotations[self.rotary].turn
            query, key = turn(query), turn(key)
        out, kept = attend(query, key, value)
        return self.output(out.reshape(*x.shape[:2], -1)), kept

    def _heads(self, x: States) -> Float[Array, "B T heads D"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class MLP(nnx.Module):
    """SwiGLU or GeGLU."""

    def __init__(self, config: ModelConfig, linear: Callable[..., Linear]):
        self.activation = config.activation
        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width, kernel_init=_residual_init(config))

    def __call__(self, x: States) -> States:
        activation = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.activation]
        return self.down(activation(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, linear: Callable[..., Linear], norm: Callable[[int], RMSNorm]):
        self.attention_norm = norm(config.width)
        self.attention = Attention(config, layer, linear, norm)
        self.mlp_norm = norm(config.width)
        self.mlp = MLP(config, linear)
        self.has_post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(config.width), norm(config.width)

    def __call__(self, x: States, rotations: Rotations, attend: AttendLayer) -> tuple[States, Any]:
        attended, kept = self.attention(self.attention_norm(x), rotations, attend)
        x = x + (self.attention_post_norm(attended) if self.has_post_norms else attended)
        out = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(out) if self.has_post_norms else out), kept


class Embed(nnx.Embed):
    """Embedded tokens; with `scaled`, times the root of their width, which is rounded to their type (Gemma)."""

    def __init__(self, vocab_size: int, width: int, *, scaled: bool, **options: Any):
        super().__init__(vocab_size, width, **options)
        self.scaled = scaled

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        x = super().__call__(inputs, out_sharding=out_sharding)
        return x * math.sqrt(x.shape[-1]) if self.scaled else x


class Transformer(nnx.Module):
    """Tokens to logits.

    Args:
      config: the model's shape; `xsake.model.PRESETS` has some.
      rngs: for the initial weights.
      dtype: of activations and matrix products; norms, rotary positions and logits are always float32.
      param_dtype: of the weights.
      attention_fn: computes attention; to compare, use `jax.nn.dot_product_attention` (without masks, cache, segments).

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from xsake.model import PRESETS, Transformer
    >>> model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 16), jnp.int32)).shape
    (1, 16, 512)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        attention_fn: Callable[..., Any] = xsake.attention,
    ):
        self.config = config
        self.dtype = dtype
        self.attention_fn = attention_fn
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype)
        linear: Callable[..., Linear] = partial(Linear, use_bias=False, kernel_init=_init(), rngs=rngs, **types)
        norm: Callable[[int], RMSNorm] = partial(RMSNorm, eps=config.norm_eps, **types)
        options: dict[str, Any] = dict(scaled=config.scaled_embedding, embedding_init=_init(), rngs=rngs)
        self.embed = Embed(config.vocab_size, config.width, **options, **types)
        self.blocks = nnx.List([Block(config, layer, linear, norm) for layer in range(config.layers)])
        self.norm = norm(config.width)
        if not config.tied:
            self.head = linear(config.width, config.vocab_size)

    def __call__(self, tokens: Tokens, *, cache: KVCache | None = None, **options: Any) -> Any:
        """Logits, float32[B, T, vocab_size]; with a cache, (logits, cache). It takes the options of `hidden`."""
        if cache is None:
            return self.logits(self.hidden(tokens, **options))
        states, cache = self.hidden(tokens, cache=cache, **options)
        return self.logits(states), cache

    def hidden(
        self,
        tokens: Tokens,
        *,
        positions: Int[Array | np.ndarray, "b T"] | None = None,
        segment_ids: Int[Array | np.ndarray, "b T"] | None = None,
        mask_fn: MaskFn | None = None,
        attention: Callable[..., Array] | None = None,
        cache: KVCache | None = None,
        mesh: Mesh | None = None,
        order: str = "contiguous",
        exchange: str = "auto",
        capacity: int | None = None,
        remat: bool = False,
    ) -> Any:
        """The final normalised states [B, T, width]; `logits` projects all of them, or some at a time.

        A token attends to itself and to the tokens before it in the sequence, whatever `positions` are.

        Args:
          tokens: integers [B, T], T at most the config's `context`.
          positions: [B, T] or [1, T], used by the rotary embedding alone; by default a token's place in its sequence.
            For packed documents, let each document start at 0.
          segment_ids: [B, T] or [1, T]; only tokens of one segment see each other. Not together with a cache.
          mask_fn: `mask_fn(layer, query, key)`, called in the forward with layer number, query [B, T, H, D] and key
            [B, S, K, D], rotary positions applied; it returns the layer's `BlockMask`, or None for dense attention.
          attention: `attention(query, key, value, layer=number, **rules)`, called in place of the `attention_fn`. Not
            together with a mask_fn or a mesh.
          cache: the tokens continue its sequences; returns (states, cache). States of tokens past its capacity are NaN.
          mesh: attention runs under `jax.shard_map`, sequences over its axis "data" and heads over its axis "model". An
            axis "sequence" cuts the tokens of each sequence: attention is `xsake.sharded_attention`. Not with a cache.
          order, exchange, capacity: those of `xsake.sharded_attention`, where an axis "sequence" cuts sequences.
            Tokens, positions, segments and states lie in that order; `mask_fn` gets queries and keys in the
            sequence's own.
          remat: keep only the residual stream between blocks for the backward pass, and compute the rest again.
        """
        batch, length = tokens.shape
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids cannot be used with a cache: each of its sequences is one segment")
        if cache is not None and (len(cache.length) != batch or length > cache.capacity):
            raise ValueError(
                f"tokens of shape {tokens.shape} do not fit a cache of {len(cache.length)} sequences with capacity "
                f"{cache.capacity}"
            )
        if cache is not None and not isinstance(cache.length, jax.core.Tracer):
            cache.check_room(length)
        cut = SequenceCut.of(mesh, order, exchange, capacity)
        if cache is not None and cut is not None:
            raise ValueError(f"a cache cannot be used with a mesh that cuts sequences: sequence={cut.shards} must be 1")
        if cut is not None and length % cut.shards:
            raise ValueError(f"{length} tokens cannot be divided over the mesh's sequence={cut.shards}")
        if positions is None and cache is not None:
            positions = cache.slots(length)
        if positions is None and cut is not None:
            positions = cut.positions(length)
        x, turned = self.start(tokens, positions)
        attend = Attend(
            attention_fn=self.attention_fn,
            attention=attention,
            mask_fn=mask_fn,
            segment_ids=None if segment_ids is None else jnp.broadcast_to(segment_ids, (batch, length)),
            slot_positions=None if cache is None or not cache.filled else cache.positions(),
            mesh=mesh,
            cut=cut,
            window_of=self.config.window_of,
        )
        for layer, block in enumerate(self.blocks):
            x = x if cut is None else cut.hold(x)
            x, cache = _run(block, x, turned, partial(attend, layer, cache), remat)
        states = self.norm(x)
        if cache is None:
            return states
        fits = cache.slots(length) < cache.capacity
        return jnp.where(fits[..., None], states, jnp.nan), cache.advance(length)

    def start(
        self, tokens: Tokens, positions: Int[Array | np.ndarray, "b T"] | None = None
    ) -> tuple[States, Rotations]:
        """The input of the first block: embedded tokens and rotations of their positions, by default 0, 1, 2, ..."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"tokens have length {length}, beyond the model's context of {self.config.context}")
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)[None]
        return self.embed(jnp.asarray(tokens)), rotations(jnp.asarray(positions), self.config)

    def layered(self) -> Layered:
        """The forward in layers, for `xsake.hads.calibrate`."""
        from xsake.hads import Layered

        split = [nnx.split(block) for block in self.blocks]
        ends, rest = nnx.split(self)
        windows = [self.config.window_of(layer) for layer in range(self.config.layers)]
        return Layered(
            rest=rest,
            start=_Start(ends),
            layers=[weights for _, weights in split],
            layer=[_Layer(graph, window) for (graph, _), window in zip(split, windows, strict=True)],
            logits=_Logits(ends),
            window=windows,
            attention_fn=self.attention_fn,
        )

    @property
    def output_weight(self) -> Float[Array, "width vocab"]:
        """The projection of final states to logits, in the type in which it is stored."""
        return self.embed.embedding[...].T if self.config.tied else self.head.kernel[...]

    def logits(self, states: States) -> Float[Array, "B T vocab"]:
        """Next-token logits of final states, in float32."""
        return _project(states, self.output_weight.astype(self.dtype))


@dataclasses.dataclass(frozen=True)
class _Start:
    graph: nnx.GraphDef

    def __call__(self, weights: Any, tokens: Tokens) -> tuple[States, Rotations]:
        return nnx.merge(self.graph, weights).start(tokens)


@dataclasses.dataclass(frozen=True)
class _Layer:
    graph: nnx.GraphDef
    window: int | None

    def __call__(self, weights: Any, x: States, rotations: Rotations, attention: Callable[..., Array]) -> States:
        window = None if self.window is None else (self.window - 1, 0)
        attend = partial(attention, is_causal=True, local_window_size=window)
        return nnx.merge(self.graph, weights)(x, rotations, lambda q, k, v: (attend(q, k, v), None))[0]


@dataclasses.dataclass(frozen=True)
class _Logits:
    graph: nnx.GraphDef

    def __call__(self, weights: Any, x: States) -> Float[Array, "B T vocab"]:
        model = nnx.merge(self.graph, weights)
        return model.logits(model.norm(x))


def _run(block: Block, x: States, rotations: Rotations, attend: AttendLayer, remat: bool) -> Any:
    def run(block: Block, x: States) -> Any:
        return block(x, rotations, attend)

    return (nnx.remat(run) if remat else run)(block, x)


@jax.custom_vjp
def _project(states: Array, weight: Array) -> Array:
    return jnp.matmul(states, weight, preferred_element_type=jnp.float32)


def _project_fwd(states: Array, weight: Array) -> tuple:
    return _project(states, weight), (states, weight)


def _project_bwd(residuals: tuple, cotangent: Array) -> tuple:
    # Without this rule, JAX would multiply the float32 cotangent by the bfloat16 operands in float32.
    states, weight = residuals
    cotangent = cotangent.astype(states.dtype)
    return jnp.matmul(cotangent, weight.T), jnp.einsum("btw,btv->wv", states, cotangent)


_project.defvjp(_project_fwd, _project_bwd)


def _init() -> nnx.Initializer:
    return nnx.initializers.normal(0.02)


def _residual_init(config: ModelConfig) -> nnx.Initializer:
    """Smaller initial weights, so that the residual stream does not grow with the number of layers (GPT-2)."""
    return nnx.initializers.normal(0.02 / math.sqrt(2 * config.layers))
