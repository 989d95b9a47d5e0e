"""Models by name: the presets, and sizes of published models that are larger than the presets."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from xsake._ground.read import read_json
from xsake.model.network.config import PRESETS, ModelConfig

# From the models' published configurations. Qwen's biases (0.01% of its parameters) are left out.
_llama = partial(ModelConfig, vocab_size=128256, kv_heads=8, context=131072, rope_base=5e5)
_qwen = partial(ModelConfig, layers=28, head_dim=128, context=131072, rope_base=1e6)
PUBLISHED = {
    "llama-1b": _llama(layers=16, width=2048, q_heads=32, head_dim=64, mlp_width=8192),
    "llama-8b": _llama(layers=32, width=4096, q_heads=32, head_dim=128, mlp_width=14336, tied=False),
    "llama-70b": _llama(layers=80, width=8192, q_heads=64, head_dim=128, mlp_width=28672, tied=False),
    "qwen2.5-1.5b": _qwen(vocab_size=151936, width=1536, q_heads=12, kv_heads=2, mlp_width=8960),
    "qwen2.5-7b": _qwen(vocab_size=152064, width=3584, q_heads=28, kv_heads=4, mlp_width=18944, tied=False),
}
MODELS = PRESETS | PUBLISHED


def find_model(name: str) -> ModelConfig:
    """A model of the table, or of a JSON file with the fields of `xsake.model.ModelConfig`."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"model={name!r} is neither a file nor a known model; known are {', '.join(MODELS)}")
    values = read_json(path)
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(ModelConfig)}
    missing = [field for field, needed in fields.items() if needed and field not in values]
    unknown = [field for field in values if field not in fields]
    if missing or unknown:
        raise ValueError(f"{path} must hold the fields of ModelConfig, {', '.join(fields)}: {missing=}, {unknown=}")
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def block_weights(config: ModelConfig) -> int:
    """Weights of one transformer block's matrices."""
    return (matmul_weights(config) - config.vocab_size * config.width) // config.layers


def matmul_weights(config: ModelConfig) -> int:
    """Weights that a token is multiplied by: the blocks' matrices and the output projection."""
    return round(config.flops_per_token(1, attention_density=0.0) / 6)
