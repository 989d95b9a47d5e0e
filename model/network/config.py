"""The shape of a model, checked when it is made; its number of parameters and its FLOPs."""

from __future__ import annotations

import dataclasses
from functools import partial

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import FLAG, maybe, number, one_of, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped heads, SwiGLU, tied or untied embeddings.

    The defaults are plain Llama; `xsake.model.network.families` has what Llama 3, Qwen and Mistral change.

    Args:
      vocab_size: rows of the embedding.
      layers: transformer blocks.
      width: size of the residual stream.
      q_heads: query heads; a multiple of `kv_heads`.
      kv_heads: heads of keys and values.
      head_dim: size of a head; even. `q_heads * head_dim` need not be `width`.
      mlp_width: the inner size of SwiGLU.
      context: the longest sequence that is accepted.
      rope_base: base of the rotary positions.
      norm_eps: epsilon of RMSNorm.
      tied: whether the embedding is also the output projection.
      qkv_bias: whether the projections to queries, keys and values add a bias (Qwen2).
      qk_norm: whether queries and keys are normalised per head before they are turned (Qwen3).
      window: a token sees itself and the `window - 1` tokens before it, in layers from `window_from` on (Mistral); None
        for no limit.
      window_from: the first layer with a window.
      full_every: every layer of this number, such as 5, 11, ... for 6, has no window (Gemma 3); None for no such layer.
      window_rope_base: base of the rotary positions in layers with a window, which are never scaled (Gemma 3); None if
        all layers have the same positions.
      unturned_every: every layer of this number knows no positions (SmolLM3); None for no such layer.
      rope_scaling: how `rope_factor` scales rotary positions, below.
      rope_factor: slow rotary frequencies are divided by this, and fast ones are not ("llama3", "yarn"), or all are
        ("linear"); 1 scales nothing.
      rope_low, rope_high, rope_context: a frequency is slow if it turns less than `rope_low` times in `rope_context`
        tokens, and fast if it turns more than `rope_high` times. Frequencies between are divided in part. YaRN's
        `rope_high` is usually 32.
      rope_gain: turned queries and keys are multiplied by this (YaRN).
      post_norms: whether the outputs of attention and MLP are normalised before they are added (Gemma).
      activation: of the MLP's gate: "silu", or "gelu" by its formula with tanh (Gemma).
      scaled_embedding: whether embedded tokens are multiplied by the root of `width` (Gemma).
      scale_dim: products of queries and keys are divided by the root of this (Gemma); None for `head_dim`.

    >>> config = PRESETS["tiny"]
    >>> dataclasses.replace(config, layers=4).param_count() > config.param_count()
    True
    """

    vocab_size: int = field(whole())
    layers: int = field(whole(most=1024))  # each takes tens of milliseconds to build
    width: int = field(whole())
    q_heads: int = field(whole())
    kv_heads: int = field(whole())
    head_dim: int = field(whole())
    mlp_width: int = field(whole())
    context: int = field(whole())
    rope_base: float = field(number(above=0), default=10_000.0)
    norm_eps: float = field(number(above=0), default=1e-5)
    tied: bool = field(FLAG, default=True)
    qkv_bias: bool = field(FLAG, default=False)
    qk_norm: bool = field(FLAG, default=False)
    window: int | None = field(maybe(whole()), default=None)
    window_from: int = field(whole(0), default=0)
    full_every: int | None = field(maybe(whole()), default=None)
    window_rope_base: float | None = field(maybe(number(above=0)), default=None)
    unturned_every: int | None = field(maybe(whole()), default=None)
    rope_scaling: str = field(one_of("llama3", "yarn", "linear"), default="llama3")
    rope_factor: float = field(number(least=1), default=1.0)
    rope_low: float = field(number(above=0), default=1.0)
    rope_high: float = field(number(above=0), default=4.0)
    rope_context: int = field(whole(), default=8192)
    rope_gain: float = field(number(above=0), default=1.0)
    post_norms: bool = field(FLAG, default=False)
    activation: str = field(one_of("silu", "gelu"), default="silu")
    scaled_embedding: bool = field(FLAG, default=False)
    scale_dim: float | None = field(maybe(number(above=0)), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads={self.q_heads} must be divisible by kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of features")
        if self.rope_scaling == "yarn" and self.rope_base <= 1:
            raise ValueError(f"rope_base={self.rope_base} must be above 1 with YaRN, which takes its logarithm")
        if self.rope_low >= self.rope_high:
            raise ValueError(f"rope_low={self.rope_low} must be below rope_high={self.rope_high}")

    def window_of(self, layer: int) -> int | None:
        """The window of one layer, None for no limit."""
        full = layer < self.window_from or _is_every(self.full_every, layer)
        return None if full else self.window

    @property
    def same_window(self) -> bool:
        """Whether all layers have the same window, or none has one."""
        return len({self.window_of(layer) for layer in range(self.layers)}) == 1

    @property
    def windowed(self) -> tuple[int, ...]:
        """The layers with a window, where other layers have none."""
        if self.same_window:
            return ()
        return tuple(layer for layer in range(self.layers) if self.window_of(layer) is not None)

    def rotary_of(self, layer: int) -> str | None:
        """Which rotary positions one layer has, "full" or "window"; None for no positions."""
        if _is_every(self.unturned_every, layer):
            return None
        windowed = self.window_rope_base is not None and self.window_of(layer) is not None
        return "window" if windowed else "full"

    def param_count(self) -> int:
        """Every parameter, a tied embedding counted once."""
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.width
        norms = ((4 if self.post_norms else 2) * self.layers + 1) * self.width
        biases = (self.q_heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return embeddings + self.layers * (self._block_weights + biases + head_norms) + norms

    def flops_per_token(self, length: int, attention_density: float = 1.0) -> float:
        """FLOPs of a training step per token of a sequence of `length`: the numerator of MFU.

        Only matrix products count: forward, and backward as twice the forward. Products that rematerialisation repeats
        do not count. Only the active part of attention counts: causal, with `attention_density` of the blocks.
        """
        if length < 1:
            raise ValueError(f"{length=} must be at least 1")
        if not 0 <= attention_density <= 1:
            raise ValueError(f"{attention_density=} must be between 0 and 1")
        weights = self.layers * self._block_weights + self.vocab_size * self.width
        keys_seen = attention_density * (length + 1) / 2
        attention = self.layers * 2 * self.q_heads * self.head_dim * keys_seen
        return 3 * 2 * (weights + attention)

    @property
    def _block_weights(self) -> int:
        attention = 2 * self.width * self.head_dim * (self.q_heads + self.kv_heads)
        return attention + 3 * self.width * self.mlp_width


def _is_every(step: int | None, layer: int) -> bool:
    """Whether a layer is one of the layers step - 1, 2 step - 1, 3 step - 1, ..."""
    return step is not None and (layer + 1) % step == 0


_long = partial(ModelConfig, head_dim=64, context=8192)
PRESETS = {
    "tiny": ModelConfig(
        vocab_size=512, layers=2, width=64, q_heads=4, kv_heads=2, head_dim=16, mlp_width=192, context=512
    ),
    "small": _long(vocab_size=16384, layers=12, width=512, q_heads=8, kv_heads=4, mlp_width=1792, rope_base=5e5),
    # As large as GPT-2 small (124M), but Llama-style like the others: not GPT-2's architecture, nor its weights. Its
    # vocabulary is GPT-2's 50257, rounded up to a multiple of 64.
    "gpt2-124m": _long(vocab_size=50304, layers=12, width=768, q_heads=12, kv_heads=12, mlp_width=2048, rope_base=5e5),
    "smollm2-135m": _long(vocab_size=49152, layers=30, width=576, q_heads=9, kv_heads=3, mlp_width=1536, rope_base=1e5),
}
