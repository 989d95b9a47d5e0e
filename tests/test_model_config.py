"""A model's shape: which values are accepted, the number of parameters, and the FLOPs."""

from __future__ import annotations

import dataclasses

import pytest
from flax import nnx
from sweep import sweep

from xsake.model import PRESETS, ModelConfig, Transformer

TINY = PRESETS["tiny"]


MODELS = [("tiny", False), *((name, True) for name in PRESETS)]


@pytest.mark.parametrize("model", sweep(MODELS, slow=[model for model in MODELS if model[0] != "tiny"]), ids=str)
def test_param_count_is_what_the_model_has(model):
    name, tied = model
    config = dataclasses.replace(PRESETS[name], tied=tied)
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    assert config.param_count() == sum(leaf.size for leaf in nnx.to_flat_state(state).leaves)


def test_presets_are_as_large_as_their_names():
    millions = {name: round(config.param_count() / 1e6) for name, config in PRESETS.items()}
    assert (millions["small"], millions["gpt2-124m"], millions["smollm2-135m"]) == (51, 124, 135)


def test_flops_are_those_of_the_matrix_products():
    """Counted by hand for one layer with one head: 6 per weight, and 12 per head feature and key seen."""
    config = ModelConfig(vocab_size=10, layers=1, width=8, q_heads=1, kv_heads=1, head_dim=4, mlp_width=16, context=128)
    weights = 4 * 8 * 4 + 3 * 8 * 16 + 10 * 8
    assert config.flops_per_token(99) == 6 * weights + 12 * 4 * 50
    assert config.flops_per_token(99, attention_density=0.5) == 6 * weights + 12 * 4 * 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=0), "layers=0 must be an int of at least 1"),
        (dict(width=64.0), "width=64.0 must be an int"),
        (dict(q_heads=3), "q_heads=3 must be divisible by kv_heads=2"),
        (dict(head_dim=15), "head_dim=15 must be even"),
        (dict(rope_base=float("inf")), "rope_base=inf must be a finite number"),
        (dict(rope_scaling="yarn", rope_base=1.0), "rope_base=1.0 must be above 1 with YaRN"),
        (dict(activation="relu"), "activation='relu' must be one of silu, gelu"),
        (dict(norm_eps=0), "norm_eps=0 must be a finite number, above 0"),
        (dict(tied="yes"), "tied='yes' must be True or False"),
    ],
)
def test_wrong_shapes_are_refused(unchecked_annotations, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("arguments", "message"), [((0,), "length=0"), ((8, 1.5), "attention_density=1.5 must be between 0 and 1")]
)
def test_wrong_costs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TINY.flops_per_token(*arguments)
