"""A study's programs, compiled from shapes alone while the study does something else."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.hads.knowledge import kind_of
from benchmarks.hads.methods import METHODS
from benchmarks.hads.study import Study
from benchmarks.hads.texts import CALIBRATION, EVALUATION
from xsake.hads.calibration import observe
from xsake.hads.calibration.fit import STEPS, fit_weights
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.profile.profile import HadsProfile, profile_shape
from xsake.hads.study import layerwise
from xsake.hads.study.divergence import compare_states, usual_chunk
from xsake.hads.study.methods.layer import TokenMask
from xsake.hads.study.methods.mask import MethodMask

CALIBRATION_PROGRAMS = ("observe", "forward", "touch", "likelihood", "cost", "fit")


def compile_evaluation(study: Study, methods: Iterable[str]) -> None:
    """Compile first the programs that every evaluation needs, then the programs of the methods."""
    s, config, compile_ = study.settings, study.model.config, study.programs.compile
    size = min(s.batch, s.sequences * len(EVALUATION))
    tokens = jax.ShapeDtypeStruct((size, s.length), jnp.int32)
    x, rotation = jax.eval_shape(study.layers.start, tokens)
    weights, graph, attention = study.layers.weights[0], study.layers.graph, study.model.attention_fn
    inputs = jax.eval_shape(lambda w, x, r: layerwise.project(graph, w, x, r, s.attention_dtype), weights, x, rotation)
    blocks = jax.ShapeDtypeStruct((size, config.q_heads, s.grid.rows, s.grid.columns), jnp.bool_)
    attend, states = layerwise.attend, jax.ShapeDtypeStruct((size, s.length, config.width), x.dtype)
    compile_("project", lambda: layerwise.project.lower(graph, weights, x, rotation, s.attention_dtype))
    block = graph, attention, weights, x, rotation, inputs
    compile_("dense", lambda: attend.lower(*block))
    compile_("sparse", lambda: attend.lower(*block, blocks, s.grid))
    whole = nnx.split(study.model)
    compile_("compare", lambda: compare_states.lower(*whole, states, states, tokens, usual_chunk()))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    profile = _profile_shape(study)
    for name in methods:
        kind, program = kind_of(name), METHODS[name].program
        known = kind and kind.shape(config)
        mask_fn = jax.eval_shape(
            lambda p, k, name=name: MethodMask.of(name, p, np.zeros(config.layers), knowledge=k), profile, known
        )
        choice = mask_fn, number, inputs[0], inputs[1]
        compile_(program, lambda choice=choice: layerwise.choose_blocks.lower(*choice))
        if kind is None:
            continue
        kept, _, memory = jax.eval_shape(layerwise.choose_blocks, *choice)
        if isinstance(kept, TokenMask):  # its attention is a program of its own
            compile_((program, "attend"), lambda kept=kept: attend.lower(*block, kept, s.grid))
        if memory is not None:  # layers after the first
            compile_((program, "again"), lambda more=(*choice, memory): layerwise.choose_blocks.lower(*more))


def compile_calibration(study: Study) -> None:
    """Compile the programs of calibration, unless the profile exists already."""
    if study.profile_path.exists():
        return
    s, cut, compile_ = study.settings, study.layers.cut, study.programs.compile
    grid, count = s.grid, s.calibration_sequences * len(CALIBRATION)
    x, rotation = jax.eval_shape(study.layers.start, jax.ShapeDtypeStruct((1, s.length), jnp.int32))
    block = study.layers.graph, study.model.attention_fn
    args = study.layers.weights[0], x, rotation
    _, seen = jax.eval_shape(lambda *args: observe.observe_block(*block, *args, grid), *args)
    _, touched = jax.eval_shape(lambda *args: observe.touch_block(*block, *args), *args, x)
    key = jax.eval_shape(lambda: jax.random.key(0))
    kept = jax.ShapeDtypeStruct(seen.statistics.mass.shape, jnp.bool_)
    many = jax.tree.map(lambda one: jax.ShapeDtypeStruct((count, *one.shape[1:]), one.dtype), seen)
    lowered = {
        "observe": lambda: observe.observe_block.lower(*block, *args, grid),
        "forward": lambda: observe.forward_block.lower(*block, *args),
        "touch": lambda: observe.touch_block.lower(*block, *args, x),
        "likelihood": lambda: observe.likelihood_gradient.lower(cut.logits, cut.rest, x, key, observe.CHUNK),
        "cost": lambda: cost_of_dropping.lower(touched, kept, grid),
        "fit": lambda: fit_weights.lower(many.pooled, many.statistics.mass, grid, STEPS),
    }
    for name in CALIBRATION_PROGRAMS:
        compile_(name, lowered[name])


def _profile_shape(study: Study) -> HadsProfile:
    """The profile with shapes in place of arrays."""
    config, s = study.model.config, study.settings
    heads = dict(q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    return profile_shape(layers=config.layers, **heads, model=s.name, **s.grid.shape, length=s.length, rule=s.grid.rule)
